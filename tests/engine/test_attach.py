"""SGLang's own launchers with ``SGLANG_PAT`` set: the engine switches, and its clients see one of all ranks."""

from __future__ import annotations

import asyncio

import pytest

from sglang_pat.testing.prefork import SERVER

GREEDY = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
BODIES = [{"input_ids": [5 + i, 7, 9], "sampling_params": GREEDY} for i in range(4)]


# launch_server without --adaptive-tp is SGLang's launcher, with its own arguments.
@pytest.mark.parametrize("module", [SERVER, "tests.engine.spawned"], ids=["command", "spawned function"])
def test_a_stock_launcher_switches(module, servers, llama):
    server = servers.get(llama, "--tp", "2", env={"SGLANG_PAT": "base_tp=1,policy=schedule"}, module=module)
    before = server.get("/server_info").json()
    assert (before["tp_size"], before["dp_size"]) == (2, 1)
    assert server.status()["layout"] == {"tp": 1, "dp": 2}
    expected = [answer["output_ids"] for answer in server.generate(BODIES)]

    async def switching():
        async with server.session() as session:
            await server.arm(session, {"tp": 2, "arrived": 4, "step": 20}, {"tp": 1, "step": 60}, {"tp": 2, "step": 90})
            work = asyncio.ensure_future(server.generate_async(BODIES))
            await server.reached(session)
            return await work

    assert [answer["output_ids"] for answer in asyncio.run(switching())] == expected
    assert server.status()["layout"] == {"tp": 2, "dp": 1}
    after = server.get("/server_info").json()
    assert {name: after[name] for name in ("tp_size", "dp_size", "max_total_num_tokens")} == {
        name: before[name] for name in ("tp_size", "dp_size", "max_total_num_tokens")
    }


def test_nothing_is_adaptive_without_the_variable(servers, llama):
    server = servers.get(llama, "--tp", "1")
    assert server.get("/pat/status").status_code == 404
    assert server.generate(BODIES[:1])[0]["meta_info"]["completion_tokens"] == GREEDY["max_new_tokens"]
