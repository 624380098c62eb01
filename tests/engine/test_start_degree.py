"""The degree in which a round starts, on a real engine whose KV runs out."""

from __future__ import annotations

import requests

from sglang_pat.testing.server import Server

FLAGS = "--tp 1 --dp 2 --adaptive-tp --pat-policy threshold --pat-switch-at 1 --schedule-conservativeness 0.05".split()


def one_round(server: Server, tokens: int) -> int:
    """16 requests, announced; how many were retracted."""
    before = server.status()["retracted"]
    server.post("/pat/round", {"requests": 16, "prompt_tokens": 12, "max_new_tokens": tokens}).raise_for_status()
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    prompts = [[6 + (97 * number + 31 * place) % 490 for place in range(12)] for number in range(16)]
    server.generate([{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts])
    requests.delete(f"{server.url}/pat/round").raise_for_status()
    return server.status()["retracted"] - before


def test_the_round_after_one_with_retractions_starts_in_twice_the_degree(servers, llama):
    server = servers.get(llama, *FLAGS, max_total_tokens=700)
    ahead = lambda: [r["to_tp"] for r in server.status()["switches"] if r["to_tp"] == 2 and r["requests"] == 0]  # noqa: E731
    assert one_round(server, tokens=20) == 0 and ahead() == []
    assert one_round(server, tokens=120) >= 4 and ahead() == [], "8 requests of 132 tokens find no room in 700"
    one_round(server, tokens=120)
    assert ahead() == [2], "before its first request"
    # A weight update finds the engine in the base layout, or takes it there.
    update = {"model_path": str(llama)}
    assert requests.post(f"{server.url}/update_weights_from_disk", json=update).json()["success"]
    assert server.status()["layout"]["tp"] == 1
