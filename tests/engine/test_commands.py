"""Aborts, pauses, flushes and clients that go away, before and after a switch."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from sglang_pat.policies.prompts import LONG_PROMPT
from sglang_pat.testing import models
from sglang_pat.testing.server import Server

from .anybody import EITHER, Anybody
from .conftest import MODELS
from .stock_answers import known
from .streams import STEPS, Stream, body, endless, held, idle, open_session, post, prompt, read, switch


@pytest.fixture
def server(servers, llama) -> Server:
    return servers.adaptive(llama)


# -- ending requests from outside, after a switch ------------------------------------------------------------


KEPT = known(body(21, tokens=300))


@pytest.mark.parametrize("degrees", [(2,), (2, 1)], ids=["tail", "back in base"])
def test_abort_by_rid(server, stock, degrees):
    async def run():
        async with server.session() as session:
            await server.arm(session, held(arrived=3))
            doomed = [asyncio.ensure_future(server.one(session, endless(22 + i, rid=f"doomed-{i}"))) for i in range(2)]
            other = asyncio.ensure_future(server.one(session, KEPT[0]))
            await server.reached(session)
            for tp in degrees:
                await switch(server, session, tp)
            for i in range(2):
                assert await post(session, server, "/abort_request", {"rid": f"doomed-{i}"}) == 200
            await server.arm(session)
            answers = await asyncio.gather(*doomed)
            stock.check([await other], KEPT)
            await idle(server, session)
            return answers

    for answer in asyncio.run(run()):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 3500


def test_abort_all(server, stock):
    async def run():
        async with server.session() as session:
            await server.arm(session, held(arrived=5))
            doomed = [asyncio.ensure_future(server.one(session, endless(31 + i))) for i in range(5)]
            await server.reached(session)
            await switch(server, session, 2)
            assert await post(session, server, "/abort_request", {"abort_all": True}) == 200
            await server.arm(session)
            answers = await asyncio.gather(*doomed)
            await idle(server, session)
            return answers

    assert [a["meta_info"]["finish_reason"]["type"] for a in asyncio.run(run())] == ["abort"] * 5
    stock.check(server.generate(KEPT), KEPT)


@pytest.mark.parametrize("degrees", [(2,), (2, 1)], ids=["tail", "back in base"])
def test_client_disconnects(server, degrees):
    async def run():
        async with open_session() as session:
            streams = [Stream() for _ in range(6)]
            await server.arm(session, held(arrived=6))
            readers = [asyncio.ensure_future(read(server, session, endless(41 + i), s)) for i, s in enumerate(streams)]
            await server.reached(session)
            for tp in degrees:
                await switch(server, session, tp)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            await server.arm(session)
            await idle(server, session)
            assert max(stream.tokens for stream in streams) <= STEPS[0] + 1

    asyncio.run(run())
    assert all(group["running"] == group["waiting"] == 0 for group in server.status()["groups"])


# -- pause and continue, with a switch while paused ------------------------------------------------------------


PAUSED = known(*(body(51 + i, tokens=300) for i in range(4)), body(56, tokens=300, frequency_penalty=0.6))


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_switch_continue(server, stock, mode, start):
    async def run():
        async with open_session() as session:
            await switch(server, session, start)
            await server.arm(session, held(arrived=len(PAUSED)))
            work = [asyncio.ensure_future(server.one(session, request)) for request in PAUSED]
            await server.reached(session)
            assert await post(session, server, "/pause_generation", {"mode": mode}) == 200
            # Now it is the pause alone that holds them.
            await server.arm(session)
            late = asyncio.ensure_future(server.one(session, PAUSED[0]))
            tokens = set()
            for tp in (3 - start, start, 3 - start):
                tokens.add((await switch(server, session, tp))["tokens"])
            # A retracted request has no KV.
            lengths = [len(request["input_ids"]) for request in PAUSED]
            assert tokens == ({0} if mode == "retract" else {sum(lengths) + len(lengths) * STEPS[0]})
            assert await post(session, server, "/continue_generation", {}) == 200
            return await asyncio.gather(*work), await late

    answers, late = asyncio.run(run())
    stock.check([*answers, late], [*PAUSED, PAUSED[0]])


def test_pause_abort_switch_continue(server, stock):
    async def run():
        async with server.session() as session:
            await server.arm(session, held(arrived=3))
            doomed = [asyncio.ensure_future(server.one(session, endless(61 + i))) for i in range(3)]
            await server.reached(session)
            await switch(server, session, 2)
            await server.arm(session)
            assert await post(session, server, "/pause_generation", {"mode": "abort"}) == 200
            answers = await asyncio.gather(*doomed)
            assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * 3
            await switch(server, session, 1)
            # Holds nothing but says when it has come, and whether a step has been made.
            await server.arm(session, {"arrived": 1}, {"batch": 1})
            late = asyncio.ensure_future(server.one(session, KEPT[0]))
            record = await switch(server, session, 2)
            assert not late.done() and record["tokens"] == 0
            assert await post(session, server, "/continue_generation", {}) == 200
            await server.reached(session)
            return await late

    stock.check([asyncio.run(run())], KEPT)


@pytest.mark.parametrize("seed", range(4))
def test_anything_in_any_order(server, stock, llama, seed):
    """The table of ``docs/pauses.md`` on an engine; ``tests/contract/test_pausing.py`` draws more of it."""

    async def run() -> list[tuple[str, int, str]]:
        async with server.session() as session:
            anybody = Anybody(server, llama, session, random.Random(seed))
            for _ in range(40):
                await anybody.anything()
            await anybody.end()
            await idle(server, session)
            return [(path, *task.result()) for path, task in anybody.tasks]

    for path, status, text in asyncio.run(run()):
        assert status in ((200, 400, 409) if path in EITHER else (200,)), (path, status, text)
        if path == "/generate":
            for answer in parts if isinstance(parts := json.loads(text), list) else [parts]:
                assert answer["meta_info"]["finish_reason"]["type"] in ("length", "abort")
    server.reconfigure(1)
    stock.check(server.generate(KEPT), KEPT)


# -- cache ----------------------------------------------------------------------------------------------------


def test_flush_cache(server):
    """Refused while requests are alive, done when they are gone, in any layout; nothing is reused afterwards."""
    request = body(71, tokens=4) | {"input_ids": prompt(71, 200)}

    def cached() -> int:
        return server.generate([request])[0]["meta_info"]["cached_tokens"]

    async def refused():
        async with server.session() as session:
            await server.arm(session, held(arrived=1))
            work = asyncio.ensure_future(server.one(session, endless(72, rid="flushed")))
            await server.reached(session)
            await switch(server, session, 2)
            assert await post(session, server, "/flush_cache") == 400
            await post(session, server, "/abort_request", {"rid": "flushed"})
            await server.arm(session)
            await work
            await idle(server, session)

    asyncio.run(refused())
    for tp in (2, 1):
        server.reconfigure(tp)
        # Twice on each replica, so that both have seen it.
        for _ in range(4):
            cached()
        assert cached() > 0
        assert server.post("/flush_cache").status_code == 200
        assert cached() == 0


SHARING = known(
    body(81, tokens=400) | {"input_ids": prompt(81, 300)},
    body(81, tokens=30) | {"input_ids": prompt(81, 300)},
    body(81, tokens=30) | {"input_ids": prompt(81, 300) + [9, 10, 11]},
)


@pytest.mark.parametrize("degrees", [(2,), (2, 1)], ids=["tail", "back in base"])
def test_prefix_is_reused_after_a_switch(server, stock, degrees):
    """A live request's prompt is in the cache of its new group."""
    alive, same, longer = SHARING

    async def run():
        async with server.session() as session:
            await server.arm(session, held(arrived=1))
            work = asyncio.ensure_future(server.one(session, alive))
            await server.reached(session)
            for tp in degrees:
                await switch(server, session, tp)
            # In the base layout the other replica gets the first of the two.
            more = (same, longer) * len(degrees)
            await server.arm(session, {"arrived": len(more)})
            answers = await asyncio.gather(*(server.one(session, b) for b in more))
            return await work, answers

    first, answers = asyncio.run(run())
    stock.check([first, *answers], [alive, *[same, longer] * len(degrees)])
    reused = [a["meta_info"]["cached_tokens"] for a in answers]
    assert max(reused) >= 299
    if degrees == (2,):
        assert min(reused) >= 299


def test_samples_of_a_long_prompt_go_where_it_is(servers):
    """SGLang sends it once before them: else half of them would compute it anew, on the other replica."""
    server = servers.adaptive(models.make_random("llama", MODELS / "llama-long", kv_heads=2, context=16384))
    sampling = {"n": 4, "max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    ids = prompt(271, LONG_PROMPT + 1)
    answers = server.post("/generate", {"input_ids": ids, "sampling_params": sampling}).json()
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [LONG_PROMPT] * 4
    short = server.post("/generate", {"input_ids": ids[1:101], "sampling_params": sampling}).json()
    assert {answer["meta_info"]["cached_tokens"] for answer in short} == {0, 99}, "the least load decides"
