"""Ranks are lent and taken back while requests run: no token changes, and those that are lent do nothing."""

from __future__ import annotations

import asyncio

from .streams import body, hold, tokens

BODIES = [body(i, 120) for i in range(4)]


async def test_two_ranks_of_which_one_is_lent(servers, session, llama):
    server = servers.adaptive(llama)
    expected = tokens(await server.generate_async(BODIES))
    work = await hold(server, session, BODIES, step=20)
    lent = server.post("/pat/lend_ranks")
    assert lent.status_code == 200, lent.text
    assert lent.json()["lent"] == [1] and lent.json()["migrated"] == 4
    status = server.status()
    assert status["layout"] == {"tp": 1, "dp": 2, "stride": 2} and status["lent"] == [1]
    assert [group["ranks"] for group in status["groups"]] == [[0]]
    await server.set_schedule(session, {"step": 30, "hold": True})
    await server.wait_for_schedule(session)
    back = server.post("/pat/take_back_ranks")
    assert back.status_code == 200, back.text
    assert back.json()["lent"] == [] and back.json()["migrated"] == 4
    await server.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected
