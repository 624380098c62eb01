"""What a user's functions answer a round, as users write them: NumPy's truth, cancelled calls, the next epoch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools

import numpy as np
import pytest

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Output, Summary
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import check_rules

from .admission_world import dumps, loads
from .rounds_world import STEP, Played, admitter, all_of

pytestmark = pytest.mark.unit


def run(mine: Admitter, judge=lambda group: True, more=lambda count: []) -> list:
    async def whole() -> list:
        round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50}, judge, more)
        return await asyncio.wait_for(all_of(round_), 30)

    return asyncio.run(whole())


@pytest.mark.parametrize("mode", ["strict", "partial"])
def test_numpys_truth_and_numbers(mode):
    mine = admitter(mode, filter_groups=True, end=False, lengths=(3, 3, 3))
    mine.feed([((np.int64(0), np.int64(7)), {"input_ids": [3, 7]})])
    assert run(mine, lambda group: np.float64(1.0) > 0)[-1].returned == 2
    again = loads(dumps(mine), mine.rules, "it")
    assert again.state.verdicts[0] > 0 and type(again.state.verdicts[0]) is float


@pytest.mark.parametrize("error", [asyncio.CancelledError, concurrent.futures.CancelledError])
def test_a_verdict_that_was_cancelled_ends_the_round(error):
    def judge(group):
        raise error("the pool was closed")

    with pytest.raises(RuntimeError, match="a callback was cancelled"):
        run(admitter(filter_groups=True), judge)


def test_prompts_of_the_next_epoch_are_kept_for_it():
    """A source that has no end goes on with the next epoch: of this one there are no others."""
    mine, asked = admitter(filter_groups=True, lengths=(3, 3, 3), end=False), []
    indices = itertools.count()

    def more(count):
        asked.append(count)
        return [((1, next(indices)), {"input_ids": [3, 1]}) for _ in range(count)]

    *_, summary = run(mine, lambda group: False, more)
    assert isinstance(summary, Summary) and summary.returned == 0 and len(asked) <= 4


def test_what_fails_after_the_end_of_a_round_takes_nothing_away():
    """As a verdict that is not needed any more, and does not take its cancelling."""

    async def whole() -> list:
        mine, engine = admitter(eta_prompts=1.0, lengths=(3, 3)), Played()
        round_, told = RolloutRound(mine, engine, 0, {"max_new_tokens": 50}), []
        async for event in round_:
            told.append(type(event))
            while round_.summary is None:
                await asyncio.sleep(STEP)
            round_.fail(RuntimeError("too late"))
        return told

    assert asyncio.run(whole()) == [Group, Group, Summary]


def test_rules_are_those_of_the_groups_that_are_half_done():
    """An earlier state may have groups of another size than the rules of today."""
    mine = Admitter(Rules(mode="partial", num_prompts=1, num_responses=2, eta_prompts=2.0))
    mine.feed([((0, index), None) for index in range(2)])
    mine.begin(0)
    mine.cancel()
    state = mine.state
    state.waiting = [group for group in (*state.waiting, *state.round.groups)] if state.round else state.waiting
    assert any(len(group.samples) == 2 for group in state.waiting)
    today = Rules(mode="partial", num_prompts=1, num_responses=4, eta_prompts=2.0)
    with pytest.raises(ValueError, match="num_responses is 4, it has groups of 2 half done"):
        check_rules(today, today, state, "it")


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("mode", ["strict", "partial"])
def test_an_engine_that_aborts_everything_ends_the_round(mode, tokens):
    class Aborting(Played):
        async def generate(self, rid, prompt, params) -> Output:
            self.calls.append((prompt["input_ids"], params))
            return Output(token_ids=[7] * tokens, logprobs=[0.0] * tokens)

    async def run():
        engine, mine = Aborting(), admitter(mode)
        before = dumps(mine)
        limit = 5000 if mode == "strict" else 50
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": limit})
        if mode == "partial" and tokens:  # a token each time: that is progress
            *_, summary = await all_of(round_)
            assert summary.returned == 2
            return
        with pytest.raises(RuntimeError, match=f"aborted 16 times after {tokens} tokens, not by its round"):
            await all_of(round_)
        assert len(engine.calls) <= 16 * 6
        assert round_.summary.cancelled
        mine.restore(round_.before)
        assert dumps(mine) == before

    asyncio.run(asyncio.wait_for(run(), 20))
