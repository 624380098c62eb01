"""The thinnest slice: a switch in the middle of a generation changes no token."""

from __future__ import annotations

import asyncio


def test_switch_up_and_down(servers, llama):
    server = servers.adaptive(llama)
    bodies = [
        {"input_ids": [5 + i, 7, 9], "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}}
        for i in range(4)
    ]
    expected = [answer["output_ids"] for answer in server.generate(bodies)]

    async def switching():
        async with server.session() as session:
            await server.arm(session, {"tp": 2, "arrived": 4, "step": 20}, {"tp": 1, "step": 60}, {"tp": 2, "step": 90})
            work = asyncio.ensure_future(server.generate_async(bodies))
            state = await server.reached(session)
            return state["switches"], await work

    switches, answers = asyncio.run(switching())
    assert [answer["output_ids"] for answer in answers] == expected
    # The prompt of three tokens, and one token more for each step.
    assert [(s["requests"], s["tokens"]) for s in switches] == [(4, 4 * (3 + step)) for step in (20, 60, 90)]
    # The prefill gives the first token, each step one more.
    for answer in answers:
        assert answer["meta_info"]["tp_from_token"] == [[0, 1], [21, 2], [61, 1], [91, 2]]
