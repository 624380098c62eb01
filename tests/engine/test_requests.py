"""Requests with several answers, several in one, streamed ones of OpenAI's API; and what arrives during a switch."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from sglang_pat.testing.server import Server, sent_event

from .conftest import fault, held
from .stock_answers import OPENAI, known
from .streams import UP_AND_DOWN, body, endless, idle, open_session, post, switch, up_and_down


@pytest.fixture
def server(servers, llama) -> Server:
    return servers.adaptive(llama)


# -- several answers to one request, and several requests in one ------------------------------------------------


SAMPLED = known(body(91))


def test_parallel_sampling(server, stock):
    request = body(91, n=4)

    async def run():
        async with server.session() as session:
            # The prompt goes first, by itself, and ends with its prefill; then its four copies.
            await server.arm(session, {"arrived": 1, "batch": 1}, *up_and_down(arrived=5))
            work = asyncio.ensure_future(server.one(session, request))
            switches = (await server.reached(session))["switches"]
            assert [record["requests"] for record in switches] == [4] * 4
            return await work

    stock.check(asyncio.run(run()), SAMPLED * 4)


BATCH = known(*(body(95 + i) for i in range(5)))


def test_one_batch_of_many_requests(server, stock):
    singles = BATCH
    request = {
        "input_ids": [single["input_ids"] for single in singles],
        "sampling_params": [single["sampling_params"] for single in singles],
    }

    async def run():
        async with server.session() as session:
            await server.arm(session, {"arrived": 1, "batch": 1}, *up_and_down(arrived=5))
            work = asyncio.ensure_future(server.one(session, request))
            switches = (await server.reached(session))["switches"]
            assert [record["requests"] for record in switches] == [5] * 4
            return await work

    stock.check(asyncio.run(run()), BATCH)


# -- OpenAI's API, streamed --------------------------------------------------------------------------------------


def piece(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("path", OPENAI)
def test_openai_streaming(server, stock, path):
    request_body, wanted = OPENAI[path], stock.openai[path]

    async def run() -> tuple[str, list[dict[str, Any]]]:
        pieces: list[str] = []
        async with open_session() as session:
            await server.arm(session, *up_and_down(arrived=1))
            async with session.post(server.url + path, json=request_body | {"stream": True}) as response:
                assert response.status == 200
                async for line in response.content:
                    chunk = sent_event(line)
                    if chunk is not None and chunk["choices"]:
                        pieces.append(piece(chunk))
            return "".join(pieces), (await server.reached(session))["switches"]

    text, switches = asyncio.run(run())
    assert [record["requests"] for record in switches] == [1] * 4
    assert text == wanted


# -- what arrives during a switch ----------------------------------------------------------------------------------


def test_health_during_switches(server):
    async def run():
        async with server.session() as session:
            await server.arm(session, {"arrived": 1, "step": 1})
            work = asyncio.ensure_future(server.one(session, endless(101, rid="healthy")))
            await server.reached(session)
            answers = []
            for tp in (*UP_AND_DOWN, *UP_AND_DOWN):
                checks = [
                    asyncio.ensure_future(session.get(server.url + path)) for path in ("/health", "/health_generate")
                ]
                await switch(server, session, tp)
                answers += checks
            await post(session, server, "/abort_request", {"rid": "healthy"})
            await work
            # Idle: the check itself is the only request when the switch comes.
            for tp in UP_AND_DOWN:
                answers.append(asyncio.ensure_future(session.get(server.url + "/health_generate")))
                await asyncio.sleep(0)
                await switch(server, session, tp)
            statuses = [response.status for response in await asyncio.gather(*answers)]
            await idle(server, session)
            return statuses

    assert set(asyncio.run(run())) == {200}


ARRIVING = known(*(body(111 + i, tokens=120) for i in range(8)))


def test_requests_that_arrive_during_a_switch(server, stock):
    """In the pause: a rank is held in it until the coordinator has them all."""

    async def during(session: aiohttp.ClientSession, tp: int) -> list[dict[str, Any]]:
        with fault(server, "QUIESCE:1:hold"):
            switching = asyncio.ensure_future(server.reconfigure_async(session, tp))
            await held(server)
            work = [asyncio.ensure_future(server.one(session, request)) for request in ARRIVING]
            # None of them goes on before the end of this block.
            while (status := await asyncio.to_thread(server.status))["requests"] < len(ARRIVING):
                await asyncio.sleep(0.02)
            assert status["switching"] and not switching.done()
        code, record = await switching
        assert code == 200 and record["requests"] == 0, record
        return await asyncio.gather(*work)

    async def run():
        async with server.session() as session:
            answers = [await during(session, tp) for tp in UP_AND_DOWN]
            await idle(server, session)
            return answers

    for answers in asyncio.run(run()):
        stock.check(answers, ARRIVING)


GRAMMATICAL = known(*(body(161 + i, tokens=60, regex=f"([a-f]{{{3 + i}}}-)+", ignore_eos=False) for i in range(4)))


def test_grammars_that_do_not_compile(server, stock):
    """Requests whose grammar is not compiled yet when the switch comes: good ones go on, bad ones get their error.

    Replicas that hold take requests, and do not look whether their grammars are compiled.
    """

    async def bad(session: aiohttp.ClientSession, i: int) -> str:
        async with session.post(server.url + "/generate", json=body(171, tokens=5, regex=f"([a-z]{{{i}}}")) as response:
            assert response.status == 400
            return (await response.json())["error"]["message"]

    async def during(session: aiohttp.ClientSession, number: int, tp: int) -> tuple[list[str], list[dict[str, Any]]]:
        count = 10 + len(GRAMMATICAL)
        await server.arm(session, {"arrived": count, "hold": True})
        errors = [asyncio.ensure_future(bad(session, 10 * number + i // 2)) for i in range(10)]
        answers = [asyncio.ensure_future(server.one(session, request)) for request in GRAMMATICAL]
        await server.reached(session)
        record = await switch(server, session, tp)
        assert record["requests"] == count, "all of them were alive: no error had been found yet"
        await server.arm(session)
        return await asyncio.gather(*errors), await asyncio.gather(*answers)

    async def run():
        async with server.session() as session:
            return [await during(session, number, tp) for number, tp in enumerate(UP_AND_DOWN)]

    for errors, answers in asyncio.run(run()):
        assert all("Failed to compile regex grammar" in error for error in errors)
        stock.check(answers, GRAMMATICAL)


NEIGHBOURS = known(body(181, tokens=60), body(182, tokens=300, regex=r"([a-f]{3}-)+"), body(183, tokens=300))


def test_grammar_leaves_its_neighbours_alone(server, stock):
    """When the first of three ends, the others move up by one row of the batch."""

    async def run():
        async with open_session() as session:
            await switch(server, session, 2)
            work = []
            for request in NEIGHBOURS:
                # One after another, so that they stand in this order.
                await server.arm(session, {"arrived": 1, "batch": 1, "hold": True})
                work.append(asyncio.ensure_future(server.one(session, request)))
                await server.reached(session)
            await server.arm(session)
            return await asyncio.gather(*work)

    stock.check(asyncio.run(run()), NEIGHBOURS)
