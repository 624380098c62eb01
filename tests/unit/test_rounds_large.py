"""Large rounds do not hold up the event loop."""

from __future__ import annotations

import asyncio

import pytest

from sglang_pat.rollout import rounds
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.rounds import RolloutRound

from .rounds_world import Played, admitter, all_of

pytestmark = pytest.mark.unit


class Counting(Played):
    """Counts what it is asked to do in each turn of the event loop."""

    def __init__(self, length=lambda prompt: prompt[0]) -> None:
        super().__init__(length)
        self.turn = 0
        self.asked: dict[int, int] = {}

    def _ask(self) -> None:
        self.asked[self.turn] = self.asked.get(self.turn, 0) + 1

    async def generate(self, rid, prompt, params) -> Output:
        self._ask()
        return await super().generate(rid, prompt, params)

    def abort(self, rid) -> None:
        self._ask()
        super().abort(rid)

    async def count(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def test_a_large_round_never_keeps_the_event_loop_for_long():
    """A hundred samples are started and, when the client goes, aborted: a slice of them in each turn of the loop."""

    async def run():
        engine, mine = Counting(), admitter(lengths=(4000,) * 30, num_prompts=20, num_responses=3)
        counting = asyncio.ensure_future(engine.count())
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 5000})
        assert not engine.calls, "nothing is started in the call itself"
        while len(engine.running) < 90:
            await asyncio.sleep(0)
        round_.cancel()
        await round_.wait()
        counting.cancel()
        assert engine.aborts == 90
        # A turn may have one slice's samples begin and another's be aborted.
        assert max(engine.asked.values()) <= 2 * rounds.SLICE

    asyncio.run(asyncio.wait_for(run(), 20))


def test_what_was_not_yet_started_is_not_started_for_a_client_that_is_gone():
    async def run():
        engine, mine = Played(), admitter(lengths=(4000,) * 30, num_prompts=20)
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 5000})
        await asyncio.sleep(0)
        round_.cancel()
        await round_.wait()
        assert len(engine.calls) <= rounds.SLICE
        assert round_.summary.cancelled
        assert len(mine.state.fresh) == 30 and not mine.state.waiting

    asyncio.run(asyncio.wait_for(run(), 20))


class AtOnce(Played):
    """Answers in the next turn of the event loop."""

    async def generate(self, rid, prompt, params) -> Output:
        await asyncio.sleep(0)
        return Output(token_ids=[7], logprobs=[-1.0], finish_reason="stop")


def test_a_round_leaves_no_timer_behind_for_each_of_its_groups():
    """The event loop would drop them all at once, in a turn that takes long."""

    async def run():
        loop, timers = asyncio.get_running_loop(), 0
        call_at = loop.call_at

        def counted(*args, **kwargs):
            nonlocal timers
            timers += 1
            return call_at(*args, **kwargs)

        loop.call_at = counted
        round_ = RolloutRound(admitter(lengths=(3,) * 40, num_prompts=30, eta_prompts=1.0), AtOnce(), 0, {})
        assert len(await all_of(round_)) == 31
        assert timers == 0

    asyncio.run(run())
