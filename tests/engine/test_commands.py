"""Aborts, pauses, flushes and clients that go away, before and after a switch."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import pytest

from sglang_pat.policies.prompts import LONG_PROMPT
from sglang_pat.testing.server import Server

from .conftest import long, make_model
from .stock_answers import known
from .streams import STEPS, Stream, body, endless, hold, idle, post, prompt, read, switch

# -- ending requests from outside, after a switch ------------------------------------------------------------


KEPT = known(body(21, tokens=300))
PLACES = pytest.mark.parametrize("degrees", [(2,), (2, 1)], ids=["tail", "back in base"])


@PLACES
@pytest.mark.parametrize("everybody", [False, True])
async def test_abort(server, session, stock, degrees, everybody):
    doomed = [endless(22 + i, rid=f"doomed-{i}") for i in range(2)]
    *doomed, other = await hold(server, session, [*doomed, *KEPT])
    for tp in degrees:
        await switch(server, session, tp)
    for which in [{"abort_all": True}] if everybody else [{"rid": f"doomed-{i}"} for i in range(2)]:
        assert await post(session, server, "/abort_request", which) == 200
    await server.set_schedule(session)
    answers = await asyncio.gather(*doomed)
    if everybody:
        answers.append(await other)
        other = server.generate_one(session, KEPT[0])
    stock.check([await other], KEPT)
    await idle(server)
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 3500


@PLACES
async def test_client_disconnects(server, session, degrees):
    streams = [Stream() for _ in range(6)]
    await server.set_schedule(session, {"arrived": 6, "step": STEPS[0], "hold": True})
    readers = [asyncio.ensure_future(read(server, session, endless(41 + i), s)) for i, s in enumerate(streams)]
    await server.wait_for_schedule(session)
    for tp in degrees:
        await switch(server, session, tp)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await server.set_schedule(session)
    await idle(server)
    assert max(stream.tokens for stream in streams) <= STEPS[0] + 1


# -- pause and continue, with a switch while paused ------------------------------------------------------------


PAUSED = known(*(body(51 + i, tokens=300) for i in range(4)), body(56, tokens=300, frequency_penalty=0.6))


@pytest.mark.parametrize("start", [long(1), 2])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_switch_continue(server, session, stock, mode, start):
    await switch(server, session, start)
    work = await hold(server, session, PAUSED)
    assert await post(session, server, "/pause_generation", {"mode": mode}) == 200
    # Now it is the pause alone that holds them.
    await server.set_schedule(session)
    late = asyncio.ensure_future(server.generate_one(session, PAUSED[0]))
    moved = set()
    for tp in (3 - start, start, 3 - start):
        moved.add((await switch(server, session, tp))["tokens"])
    # A retracted request has no KV.
    lengths = [len(request["input_ids"]) for request in PAUSED]
    assert moved == ({0} if mode == "retract" else {sum(lengths) + len(lengths) * STEPS[0]})
    assert await post(session, server, "/continue_generation", {}) == 200
    stock.check(await asyncio.gather(*work, late), [*PAUSED, PAUSED[0]])


async def test_pause_abort_switch_continue(server, session, stock):
    doomed = await hold(server, session, [endless(61 + i) for i in range(3)])
    await switch(server, session, 2)
    await server.set_schedule(session)
    assert await post(session, server, "/pause_generation", {"mode": "abort"}) == 200
    answers = await asyncio.gather(*doomed)
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * 3
    await switch(server, session, 1)
    # Holds nothing but says when it has come, and whether a step has been made.
    await server.set_schedule(session, {"arrived": 1}, {"batch": 1})
    late = asyncio.ensure_future(server.generate_one(session, KEPT[0]))
    record = await switch(server, session, 2)
    assert not late.done() and record["tokens"] == 0
    assert await post(session, server, "/continue_generation", {}) == 200
    await server.wait_for_schedule(session)
    stock.check([await late], KEPT)


# -- anything in any order -------------------------------------------------------------------------------------

WHAT = (
    "generate generate generate n abort abort_all pause pause continue flush patient update update release resume "
    "probe switch switch"
).split()


class Anybody:
    """Clients and a trainer who do whatever ``rng`` says, at once (``docs/pauses.md``); some of it has to be answered
    now."""

    def __init__(self, server: Server, model: Path, session: aiohttp.ClientSession, rng: random.Random) -> None:
        self.server, self.model, self.session, self.rng = server, str(model), session, rng
        self.tasks: list[tuple[str, asyncio.Future]] = []
        self.mode = ""

    async def ask(self, path: str, data: dict | None, method: str = "POST") -> tuple[int, str]:
        async with self.session.request(method, self.server.url + path, json=data) as response:
            return response.status, await response.text()

    def does(self, path: str, data: dict | None = None, method: str = "POST") -> asyncio.Future:
        self.tasks.append((path, asyncio.ensure_future(self.ask(path, data, method))))
        return self.tasks[-1][1]

    async def anything(self) -> None:
        rng, number = self.rng, len(self.tasks)
        update = {"model_path": self.model, "flush_cache": False, "abort_all_requests": rng.random() < 0.3}
        what = rng.choice(WHAT)
        if what in ("generate", "n"):
            n = {"n": 2} if what == "n" else {}
            self.does("/generate", body(number, tokens=rng.choice([5, 200, 800]), rid=f"any-{number}", **n))
        elif what == "abort":
            await self.does("/abort_request", {"rid": f"any-{rng.randrange(number + 1)}"})
        elif what == "abort_all":
            await self.does("/abort_request", {"abort_all": True})
        elif what == "pause":
            self.mode = rng.choice(["in_place", "retract", "abort"])
            await self.does("/pause_generation", {"mode": self.mode})
        elif what == "continue":
            self.mode = ""
            await self.does("/continue_generation", {})
        elif what == "flush":
            await self.does("/flush_cache")
        elif what == "patient":
            flush = self.does("/flush_cache?timeout=500")
            if self.mode == "retract":
                assert (await flush)[0] == 200
        elif what == "update":
            updates = [self.does("/update_weights_from_disk", update) for _ in range(rng.choice([1, 3]))]
            if self.mode in ("in_place", "retract"):
                await asyncio.gather(*updates)
        elif what in ("release", "resume"):
            await self.does(f"/{what}_memory_occupation", {"tags": ["kv_cache"]})
        elif what == "probe":
            await self.does("/health_generate", method="GET")
        else:
            await self.does("/pat/reconfigure", {"tp": rng.choice([1, 2])})

    async def end(self) -> None:
        """Whatever has stopped something lets it go on: then all is answered."""
        self.does("/continue_generation", {})
        self.does("/resume_memory_occupation", {"tags": ["kv_cache"]})
        for _, task in self.tasks:
            while not (await asyncio.wait([task], timeout=0.2))[0]:
                await self.ask("/abort_request", {"abort_all": True})
                await self.ask("/continue_generation", {})


EITHER = {"/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/pat/reconfigure"}
"""What may be refused: requests run, memory is not there, a switch is under way."""


@pytest.mark.parametrize("seed", [0, long(1), long(2), long(3)])
async def test_anything_in_any_order(server, session, stock, llama, seed):
    """The table of ``docs/pauses.md`` on an engine; ``tests/contract/test_pausing.py`` draws more of it."""
    anybody = Anybody(server, llama, session, random.Random(seed))
    for _ in range(40):
        await anybody.anything()
    await anybody.end()
    await idle(server)
    for path, task in anybody.tasks:
        status, text = task.result()
        assert status in ((200, 400, 409) if path in EITHER else (200,)), (path, status, text)
        if path == "/generate":
            for answer in parts if isinstance(parts := json.loads(text), list) else [parts]:
                assert answer["meta_info"]["finish_reason"]["type"] in ("length", "abort")
    server.reconfigure(1)
    stock.check(await server.generate_async(KEPT), KEPT)


# -- cache ----------------------------------------------------------------------------------------------------


async def test_flush_cache(server, session):
    """Refused while requests are alive, done when they are gone, in any layout; nothing is reused afterwards."""
    request = body(71, tokens=4) | {"input_ids": prompt(71, 200)}

    async def cached() -> int:
        return (await server.generate_one(session, request))["meta_info"]["cached_tokens"]

    (work,) = await hold(server, session, [endless(72, rid="flushed")])
    await switch(server, session, 2)
    assert await post(session, server, "/flush_cache") == 400
    await post(session, server, "/abort_request", {"rid": "flushed"})
    await server.set_schedule(session)
    await work
    await idle(server)
    for tp in (2, 1):
        server.reconfigure(tp)
        # Twice on each replica, so that both have seen it.
        for _ in range(4):
            await cached()
        assert await cached() > 0
        assert server.post("/flush_cache").status_code == 200
        assert await cached() == 0


SHARING = known(
    body(81, tokens=400) | {"input_ids": prompt(81, 300)},
    body(81, tokens=30) | {"input_ids": prompt(81, 300)},
    body(81, tokens=30) | {"input_ids": prompt(81, 300) + [9, 10, 11]},
)


@PLACES
async def test_prefix_is_reused_after_a_switch(server, session, stock, degrees):
    """A live request's prompt is in the cache of its new group."""
    alive, same, longer = SHARING
    (work,) = await hold(server, session, [alive])
    for tp in degrees:
        await switch(server, session, tp)
    # In the base layout the other replica gets the first of the two.
    more = (same, longer) * len(degrees)
    await server.set_schedule(session, {"arrived": len(more)})
    answers = await asyncio.gather(*(server.generate_one(session, b) for b in more))
    stock.check([await work, *answers], [alive, *more])
    reused = [a["meta_info"]["cached_tokens"] for a in answers]
    assert max(reused) >= 299
    if degrees == (2,):
        assert min(reused) >= 299


def test_samples_of_a_long_prompt_go_where_it_is(servers):
    """SGLang sends it once before them: else half of them would compute it anew, on the other replica."""
    server = servers.adaptive(make_model("llama", "llama-long", kv_heads=2, context=16384))
    sampling = {"n": 4, "max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    ids = prompt(271, LONG_PROMPT + 1)
    answers = server.post("/generate", {"input_ids": ids, "sampling_params": sampling}).json()
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [LONG_PROMPT] * 4
    short = server.post("/generate", {"input_ids": ids[1:101], "sampling_params": sampling}).json()
    assert {answer["meta_info"]["cached_tokens"] for answer in short} == {0, 99}, "the least load decides"
