"""README's command and no other flag."""

from __future__ import annotations

from sglang_pat.memory.plan import CPU_TOKENS

PLAIN = ("--tp", "1", "--dp", "2", "--adaptive-tp")


def test_the_pool_is_planned(servers, llama):
    server = servers.get(llama, *PLAIN, max_total_tokens=None)
    answer = server.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}})
    assert answer.status_code == 200
    assert server.get("/server_info").json()["max_total_num_tokens"] == CPU_TOKENS
    log = server.log_text()
    assert "memory plan: tp1×dp2, 2 ranks; the machine has" in log
    assert f"KV, {CPU_TOKENS:,} tokens" in log
