"""The thinnest slice: a switch in the middle of a generation changes no token."""

from __future__ import annotations

import asyncio


def test_switch_up_and_down(servers, llama):
    server = servers.adaptive(llama)
    bodies = [
        {"input_ids": [5 + i, 7, 9], "sampling_params": {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}}
        for i in range(4)
    ]
    expected = [answer["output_ids"] for answer in server.generate(bodies)]

    async def switching():
        async with server.session() as session:
            work = asyncio.ensure_future(server.generate_async(bodies))
            await server.until_decoding(session, 4)
            for tp in (2, 1, 2):
                await asyncio.sleep(0.05)
                code, record = await server.reconfigure_async(session, tp)
                assert code == 200, record
                assert record["requests"] == 4
            return await work

    assert [answer["output_ids"] for answer in asyncio.run(switching())] == expected
