"""Requests with several answers, several in one, streamed ones of OpenAI's API; and what arrives during a switch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_pat.testing.server import parse_event

from .conftest import fault, wait_until_held
from .stock_answers import OPENAI, known
from .streams import UP_AND_DOWN, body, endless, idle, post, switch, up_and_down, wait_for_status

# -- several answers to one request, and several requests in one ------------------------------------------------


SAMPLED = known(body(91))
BATCH = known(*(body(95 + i) for i in range(5)))
FIELDS = "input_ids", "sampling_params"


@pytest.mark.parametrize(
    "request_body, expected", [(body(91, n=4), SAMPLED * 4), ({f: [b[f] for b in BATCH] for f in FIELDS}, BATCH)],
    ids=["samples", "batch"],
)  # fmt: skip
async def test_several_in_one(server, session, stock, request_body, expected):
    """A prompt of samples goes first, by itself, and ends with its prefill; then its four copies."""
    await server.set_schedule(session, {"arrived": 1, "batch": 1}, *up_and_down(arrived=5))
    work = asyncio.ensure_future(server.generate_one(session, request_body))
    switches = (await server.wait_for_schedule(session))["switches"]
    assert [record["requests"] for record in switches] == [len(expected)] * 4
    stock.check(await work, expected)


# -- OpenAI's API, streamed --------------------------------------------------------------------------------------


def piece(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("path", OPENAI)
async def test_openai_streaming(server, session, stock, path):
    pieces: list[str] = []
    await server.set_schedule(session, *up_and_down(arrived=1))
    async with session.post(server.url + path, json=OPENAI[path] | {"stream": True}) as response:
        assert response.status == 200
        async for line in response.content:
            chunk = parse_event(line)
            if chunk is not None and chunk["choices"]:
                pieces.append(piece(chunk))
    switches = (await server.wait_for_schedule(session))["switches"]
    assert [record["requests"] for record in switches] == [1] * 4
    assert "".join(pieces) == stock.openai[path]


# -- what arrives during a switch ----------------------------------------------------------------------------------


async def test_health_during_switches(server, session):
    await server.set_schedule(session, {"arrived": 1, "step": 1})
    work = asyncio.ensure_future(server.generate_one(session, endless(101, rid="healthy")))
    await server.wait_for_schedule(session)
    answers = []
    for tp in (*UP_AND_DOWN, *UP_AND_DOWN):
        checks = [asyncio.ensure_future(session.get(server.url + path)) for path in ("/health", "/health_generate")]
        await switch(server, session, tp)
        answers += checks
    await post(session, server, "/abort_request", {"rid": "healthy"})
    await work
    # Idle: the check itself is the only request when the switch comes.
    for tp in UP_AND_DOWN:
        answers.append(asyncio.ensure_future(session.get(server.url + "/health_generate")))
        await asyncio.sleep(0)
        await switch(server, session, tp)
    assert {response.status for response in await asyncio.gather(*answers)} == {200}
    await idle(server)


ARRIVING = known(*(body(111 + i, tokens=120) for i in range(8)))


async def test_requests_that_arrive_during_a_switch(server, session, stock):
    """A rank is held in the pause until the coordinator has them all."""
    for tp in UP_AND_DOWN:
        with fault(server, "QUIESCE:1:hold"):
            switching = asyncio.ensure_future(server.reconfigure_async(session, tp))
            await wait_until_held(server)
            work = [asyncio.ensure_future(server.generate_one(session, request)) for request in ARRIVING]
            # None of them goes on before the end of this block.
            status = await wait_for_status(server.status, lambda status: status["requests"] == len(ARRIVING))
            assert status["switching"] and not switching.done()
        code, record = await switching
        assert code == 200 and record["requests"] == 0, record
        stock.check(await asyncio.gather(*work), ARRIVING)
    await idle(server)


GRAMMATICAL = known(*(body(161 + i, tokens=60, regex=f"([a-f]{{{3 + i}}}-)+", ignore_eos=False) for i in range(4)))


async def test_grammars_that_do_not_compile(server, session, stock):
    """Requests whose grammar is not compiled yet when the switch comes: good ones go on, bad ones get their error.

    Replicas that hold take requests, and do not look whether their grammars are compiled.
    """

    async def bad(i: int) -> str:
        async with session.post(server.url + "/generate", json=body(171, tokens=5, regex=f"([a-z]{{{i}}}")) as response:
            assert response.status == 400
            return (await response.json())["error"]["message"]

    for number, tp in enumerate(UP_AND_DOWN):
        count = 10 + len(GRAMMATICAL)
        await server.set_schedule(session, {"arrived": count, "hold": True})
        errors = [asyncio.ensure_future(bad(10 * number + i // 2)) for i in range(10)]
        answers = [asyncio.ensure_future(server.generate_one(session, request)) for request in GRAMMATICAL]
        await server.wait_for_schedule(session)
        record = await switch(server, session, tp)
        assert record["requests"] == count, "all of them were alive: no error had been found yet"
        await server.set_schedule(session)
        for error in await asyncio.gather(*errors):
            assert "Failed to compile regex grammar" in error
        stock.check(await asyncio.gather(*answers), GRAMMATICAL)


NEIGHBOURS = known(body(181, tokens=60), body(182, tokens=300, regex=r"([a-f]{3}-)+"), body(183, tokens=300))


async def test_grammar_leaves_its_neighbours_alone(server, session, stock):
    """When the first of three ends, the others move up by one row of the batch."""
    await switch(server, session, 2)
    work = []
    for request in NEIGHBOURS:
        # One after another, so that they stand in this order.
        await server.set_schedule(session, {"arrived": 1, "batch": 1, "hold": True})
        work.append(asyncio.ensure_future(server.generate_one(session, request)))
        await server.wait_for_schedule(session)
    await server.set_schedule(session)
    stock.check(await asyncio.gather(*work), NEIGHBOURS)
