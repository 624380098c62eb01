"""Rewards of a round's responses, on an engine that is played: when they are asked for, and what they cost no more."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from sglang_pat.rollout.missing import MISSING, Missing
from sglang_pat.rollout.records import Group, Output, SampleId, Summary
from sglang_pat.rollout.rewards import Response, Rewards
from sglang_pat.rollout.rounds import RolloutRound

from .admission_world import dumps, loads
from .rounds_world import FOREVER, Played, admitter, list_events
from .test_rollout_client import PlayedServer, play

pytestmark = pytest.mark.unit


class Judging:
    """A reward: the length of the prompt, when ``open`` is set.

    Attributes:
        asked: responses; ``cancelled``: indices of prompts.
    """

    def __init__(self, open: bool = True) -> None:
        self.asked: list[Response] = []
        self.cancelled: list[int] = []
        self.open = asyncio.Event()
        if open:
            self.open.set()

    async def __call__(self, response: Response) -> float:
        self.asked.append(response)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(response.sample.index)
            raise
        return float(response.prompt["input_ids"][0])


class Uneven(Played):
    """``lengths``: of a response by the first token of its prompt, and its number; others are as long as that token."""

    def __init__(self, lengths: dict[tuple[int, int], int]) -> None:
        super().__init__()
        self.lengths = lengths

    async def generate(self, rid, prompt, params):
        first, *rest = prompt["input_ids"]
        length = self.lengths.get((first, int(rid.split("-")[-2])), first)
        return await super().generate(rid, {"input_ids": [length, *rest]}, params)


def begin(mine, engine, reward, limit: int = 50, judge: Any = lambda group: True, version: int = 0) -> RolloutRound:
    return RolloutRound(mine, engine, version, {"max_new_tokens": limit}, judge, reward=reward)


def rewards(groups: list[Group]) -> list[list[float | None]]:
    return [[sample.reward for sample in group.list_kept()] for group in groups]


async def test_a_response_is_rewarded_when_it_ends():
    """The other one to its prompt runs for ever."""

    engine, judging = Uneven({(3, 1): FOREVER}), Judging()
    round_ = begin(admitter(3, 3, eta_prompts=1.0), engine, judging, limit=FOREVER)
    while len(judging.asked) < 2:
        await asyncio.sleep(0)
    assert sorted(response.sample.index for response in judging.asked) == [0, 1] and len(engine.running) == 2
    assert all(response.output.tokens == 3 and response.output.finish_reason == "stop" for response in judging.asked)
    round_.cancel()
    await round_.wait()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
async def test_what_is_returned_has_its_rewards(mode, plain):
    judging = Judging()
    reward = (lambda response: np.float32(response.prompt["input_ids"][0])) if plain else judging
    *groups, summary = await list_events(begin(admitter(3, 5, 40, mode=mode), Played(), reward))
    assert isinstance(summary, Summary) and rewards(groups) == [[3.0, 3.0], [5.0, 5.0]]


async def test_the_tail_of_a_round_does_not_wait_for_rewards_nor_they_for_it():
    """All is out of the engine, and what is not of the batch is cancelled, before one reward has come."""
    engine, judging = Played(), Judging(open=False)
    round_ = begin(admitter(3, 5, 6, 40, eta_prompts=2.0), engine, judging)
    while round_.summary is None:
        await asyncio.sleep(0)
    assert not engine.running and round_.summary.returned == 2
    judging.open.set()
    *groups, _ = await list_events(round_)
    assert sorted(rewards(groups)) == [[3.0, 3.0], [5.0, 5.0]]
    assert 40 not in [response.prompt["input_ids"][0] for response in judging.asked]
    assert set(judging.cancelled) <= {2}


async def test_the_reward_of_what_is_thrown_away_is_cancelled():
    """One response to a prompt has ended and one has not when the batch is complete."""

    judging = Judging(open=False)
    round_ = begin(admitter(3, 5, 40), Uneven({(40, 0): 2}), judging)
    while round_.summary is None:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert judging.cancelled == [2]
    judging.open.set()
    assert (await list_events(round_))[-1].deferred == 1


async def test_draws_that_are_thrown_away_are_not_waited_for():
    """A deferred prompt's first draw is too short.  Nobody waits for its rewards."""
    mine, engine, judging = admitter(10, 30, unbiased=True, num_prompts=1, eta_prompts=2.0), Uneven({}), Judging()
    *groups, _ = await list_events(begin(mine, engine, judging))
    assert [group.index for group in groups] == [0]
    judging.open.clear()
    engine.lengths = {(30, 0): 2, (30, 1): 6}
    round_ = begin(mine, engine, judging, version=1)
    while not judging.cancelled:
        assert round_.summary is None
        await asyncio.sleep(0)
    judging.open.set()
    *groups, _ = await list_events(round_)
    assert rewards(groups) == [[30.0, 30.0]] and judging.cancelled == [1]


async def test_rewards_of_a_draw_that_the_last_response_rejects_are_cancelled():
    """Draw 2 is whole before draw 1 turns out to be too short, with which the round ends."""
    rules: Any = dict(unbiased=True, num_prompts=1, num_responses=4, eta_prompts=2.0)
    mine, engine, opened = admitter(10, 30, **rules), Uneven({}), threading.Event()
    await list_events(begin(mine, engine, lambda response: 1.0))
    mine.state.waiting[0].floors = [20, 20, 20, 2]
    lengths = [1] * 4 + [18, 10, 11, 1] + [3, 3, 3, 5]
    engine.lengths = {(30, number): length for number, length in enumerate(lengths)}

    def reward(response: Response) -> float:
        if response.sample.number in (5, 6):
            opened.wait()
        return 1.0

    round_ = begin(mine, engine, reward, version=1)
    async with aclosing(aiter(round_)) as events:
        group = await anext(events)
        await round_.wait()
        for _ in range(10):  # whoever trains is not quick
            await asyncio.sleep(0)
        opened.set()
        assert sorted(group.chosen) == [8, 9, 10, 11] and isinstance(await anext(events), Summary)


async def test_a_verdict_is_asked_for_with_the_rewards():
    seen = []

    def judge(group: Group) -> bool:
        seen.append([sample.reward for sample in group.list_kept()])
        return group.index != 0

    *groups, _ = await list_events(begin(admitter(3, 4, 5, filter_groups=True), Played(), Judging(), judge=judge))
    assert [3.0, 3.0] in seen and None not in [value for values in seen for value in values]
    assert sorted(group.index for group in groups) == [1, 2]


async def test_partial_keeps_rewards_for_the_round_that_returns_the_group():
    """Saved in between.  Those of responses that ended in an earlier round are not asked for again."""
    rules: Any = dict(mode="partial", num_prompts=1, num_responses=2, eta_prompts=3.0, max_staleness=5)
    mine, asked, engine = admitter(3, 20, 30, **rules), [], Uneven({(20, 0): 2, (30, 0): 2})

    async def reward(response: Response) -> float:
        asked.append((response.sample.index, response.sample.number))
        return 7.0

    groups = []
    for version in range(3):
        *found, _ = await list_events(begin(mine, engine, reward, version=version))
        groups += found
        mine = loads(dumps(mine), mine.rules)
    assert rewards(groups) == [[7.0, 7.0]] * 3
    assert sorted(asked) == [(index, number) for index in range(3) for number in range(2)]


async def test_who_leaves_waits_for_no_reward():
    engine, judging, mine = Played(), Judging(open=False), admitter(3, 3, 3)
    round_ = begin(mine, engine, judging)
    while round_.summary is None or len(judging.asked) < 4:
        await asyncio.sleep(0)
    round_.cancel()
    await asyncio.wait_for(round_.wait(), 60)
    round_.undo()
    assert len(judging.cancelled) == len(judging.asked) == 4
    assert len(mine.state.fresh) == 3


async def test_once_rewards_are_stopped_none_is_asked_for():
    judging = Judging()
    stopped = Rewards(judging, print, print)
    stopped.stop()
    stopped.begin(Response(sample=SampleId(0, 0, 0, 0), prompt={"input_ids": [1]}, output=Output()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not judging.asked


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("given", [math.nan, math.inf, None, "1.0", [1.0]])
async def test_what_is_no_reward_ends_the_round(given, late):
    """The engine may have nothing of it any more."""
    mine, opened = admitter(3, 3, eta_prompts=1.0), asyncio.Event()

    async def reward(response: Response) -> Any:
        await opened.wait()
        return given

    round_ = begin(mine, Played(), reward)
    while late and round_.summary is None:
        await asyncio.sleep(0)
    opened.set()
    with pytest.raises(ValueError, match=r"the reward of response [01] to prompt \[0, [01]\] is .*, must be a finite"):
        await asyncio.wait_for(list_events(round_), 60)
    await round_.wait()
    round_.undo()
    assert len(mine.state.fresh) == 2


async def test_a_reward_that_raises_or_is_cancelled_ends_the_round():
    def raises(response: Response) -> float:
        raise KeyError("no answer")

    with pytest.raises(KeyError, match="no answer"):
        await asyncio.wait_for(list_events(begin(admitter(3, 3), Played(), raises)), 60)

    async def cancelled(response: Response) -> float:
        raise asyncio.CancelledError("the pool was closed")

    with pytest.raises(RuntimeError, match="a reward was cancelled: the pool was closed"):
        await asyncio.wait_for(list_events(begin(admitter(3, 3), Played(), cancelled)), 60)


def test_over_http():
    *groups, _ = play(PlayedServer(), admitter(3, 4, 0), reward=lambda response: response.output.tokens)
    assert rewards(groups) == [[3.0, 3.0], [4.0, 4.0]]


async def test_a_missing_reward_is_no_reward_of_nought():
    """What is trained on is what has a reward, and something to be compared with."""

    def reward(response: Response) -> float | Missing:
        prompt, number = response.prompt["input_ids"][0], response.sample.number
        return MISSING if prompt == 3 or (prompt, number) == (4, 1) else float(number)

    *groups, _ = await list_events(
        begin(admitter(3, 4, 5, num_prompts=3, num_responses=3, eta_prompts=1.0, eta_responses=1.0), Played(), reward)
    )
    found = {group.prompt["input_ids"][0]: group for group in groups}
    assert [sample.reward for sample in found[4].list_kept()].count(None) == 1
    numbers = {prompt: sorted(sample.number for sample in group.list_rewarded()) for prompt, group in found.items()}
    assert numbers == {3: [], 4: [0, 2], 5: [0, 1, 2]}


def test_a_reward_that_is_no_function():
    with pytest.raises(ValueError, match="reward is 'accuracy', must be a function of a response"):
        play(PlayedServer(), admitter(3, 4), reward="accuracy")
