"""Ranks are lent and taken back while requests run: no token changes, and those that are lent do nothing."""

from __future__ import annotations

import asyncio

import pytest

from .streams import body, hold, tokens

BODIES = [body(i, 120) for i in range(6)]


async def run_to(server, session, step: int) -> None:
    """All replicas hold so many steps from here."""
    await server.set_schedule(session, {"step": step, "hold": True})
    await server.wait_for_schedule(session)


def ask(server, path: str, **given):
    answer = server.post(path, given or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_two_ranks_of_which_one_is_lent(servers, session, llama):
    server = servers.adaptive(llama)
    expected = tokens(await server.generate_async(BODIES))
    work = await hold(server, session, BODIES, step=20)
    record = ask(server, "/pat/lend_ranks")
    assert (record["lent"], record["migrated"], record["released_bytes"]) == ([1], len(BODIES), 0)
    status = server.status()
    assert status["layout"] == {"tp": 1, "dp": 2, "stride": 2} and status["lent"] == [1]
    assert [group["ranks"] for group in status["groups"]] == [[0]]
    assert ask(server, "/pat/lend_ranks") == {}, "it is so already"
    await run_to(server, session, 30)
    record = ask(server, "/pat/take_back_ranks")
    assert (record["lent"], record["migrated"]) == ([], len(BODIES))
    assert [group["running"] for group in server.status()["groups"]] == [3, 3]
    assert ask(server, "/pat/take_back_ranks") == {}
    await server.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected


@pytest.fixture
def saving(servers, llama):
    """With a memory saver that loses what it releases."""
    return servers.as_on_cuda(llama, 4, "--enable-memory-saver")


async def test_memory_of_lent_ranks_comes_back_as_it_was(saving, session):
    """Also through switches of the others."""
    expected = tokens(await saving.generate_async(BODIES))
    work = await hold(saving, session, BODIES, step=10)
    record = ask(saving, "/pat/lend_ranks", stride=2)
    assert record["lent"] == [1, 3] and record["released_bytes"] > 2 * 16384
    await run_to(saving, session, 10)
    assert (await saving.reconfigure_async(session, 2))[0] == 200
    await run_to(saving, session, 10)
    ask(saving, "/pat/take_back_ranks")
    assert (await saving.reconfigure_async(session, 4))[0] == 200
    await run_to(saving, session, 10)
    assert (await saving.reconfigure_async(session, 1))[0] == 200
    await saving.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected
