"""Dynamic sampling: groups are judged, useless ones are replaced, and batches are full all the same."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import LEAST_KEPT

from .admission_world import Clock, World, strict

pytestmark = pytest.mark.unit


def epoch(mode: str, useless: float, prompts: int = 400, size: int = 8) -> World:
    """One epoch; so many groups are useless, and prompts come when they are wanted or asked for, and no earlier."""
    rng, left = random.Random(1), iter(range(prompts))
    rules = Rules(mode=mode, num_prompts=size, num_responses=2, filter_groups=True, max_staleness=4)
    world = World(rules, lambda key, number: 1 + hash((key.index, number)) % 50)
    bad = {index for index in range(prompts) if rng.random() < useless}

    def feed(count: int) -> None:
        indices = list(islice(left, count))
        world.feed(0, indices, end=len(indices) < count)

    clock = Clock(world, useful=lambda key: key.index not in bad, more=feed)
    while True:
        if wanted := world.admitter.wanted:
            feed(wanted)
        if not (world.admitter.state.fresh or world.admitter.state.waiting):
            return world
        clock.round()


@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
@pytest.mark.parametrize("useless", [0.5, 0.8])
def test_batches_are_full_until_the_epoch_ends(mode, useless):
    world = epoch(mode, useless)
    *full, last = [summary.returned for summary in world.rounds]
    assert set(full) == {8}
    assert 0 < last <= 8
    assert len(world.returned) + len(world.filtered) == 400
    assert all(age <= world.admitter.rules.max_deferrals for summary in world.rounds for age in summary.ages)


def test_what_is_useless_is_started_for_in_advance():
    """Twice as many are started, and fed, once it is known that every second group is useless."""
    world = World(strict(num_prompts=8, eta_prompts=1.0, eta_responses=1.0, filter_groups=True))
    assert world.admitter.wanted == 8
    world.admitter.state.verdicts = [49.0, 99.0]
    assert world.admitter.wanted == 16
    world.feed(0, range(40))
    world.begin()
    assert len({sample.key for sample in world.running}) == 16
    world.admitter.state.verdicts = [0.0, 99.0]
    assert world.admitter.state.keep_rate == LEAST_KEPT


def test_no_more_is_started_than_the_places_that_are_free_need():
    """7 of 8 places are taken; one group in two is useless: two of them are enough for the last place."""
    world = World(
        strict(num_prompts=8, num_responses=1, eta_prompts=1.0, eta_responses=1.0, filter_groups=True),
        lambda key, number: 1,
    )
    world.admitter.state.verdicts = [4999.0, 9999.0]
    world.feed(0, range(60))
    world.begin()
    for _ in range(7):
        world.finish(next(iter(world.running)))
        world.judge(world.judging[0], True)
    for _ in range(9):
        world.finish(next(iter(world.running)))
        world.judge(world.judging[0], False)
    assert len(world.running) == 3, "a little more than two, after nine useless ones"


def test_a_round_asks_once_and_starts_what_comes():
    world = World(strict(num_prompts=4, num_responses=1, eta_prompts=1.0, eta_responses=1.0, filter_groups=True))
    world.feed(0, range(4))
    world.begin()
    assert world.asked == 0
    for sample in list(world.running):
        world.finish(sample)
    for key in list(world.judging):
        world.judge(key, False)
    assert world.asked >= 4 and not world.rounds, "it waits for prompts"
    asked = world.asked
    world.feed(0, range(4, 6))
    assert len(world.running) == 2
    assert world.asked == asked - 2, "and does not ask again for those that it has asked for"
    world.feed(0, [6], end=True)
    assert len(world.running) == 3
    for sample in list(world.running):
        world.finish(sample)
    for key in list(world.judging):
        world.judge(key, True)
    assert [summary.returned for summary in world.rounds] == [3], "the epoch has ended: there are no others"


def test_a_round_that_gets_no_prompts_ends_with_what_it_has():
    world = World(strict(num_prompts=4, num_responses=1, eta_prompts=1.0, eta_responses=1.0, filter_groups=True))
    world.feed(0, range(4))
    world.begin()
    for sample in list(world.running):
        world.finish(sample)
    for place, key in enumerate(list(world.judging)):
        world.judge(key, place > 1)
    assert not world.rounds
    world.end_prompts()
    assert [(summary.returned, summary.filtered) for summary in world.rounds] == [(2, 2)]


@pytest.mark.parametrize("useful", [(0, 1), (2, 3)])
def test_verdicts_that_are_found_together_count_before_the_batch_is_full(useful):
    """The useless are gone though the others fill the batch, and no prompt is started in place of one."""
    world = World(strict(num_prompts=2, num_responses=1, eta_prompts=2.0, eta_responses=1.0, filter_groups=True))
    world.feed(0, range(8))
    world.begin()
    assert len(world.running) == 4
    for sample in list(world.running):
        world.finish(sample)
    started = world.admitter.state.drawn
    world.judge_all({key: key.index in useful for key in list(world.judging)})
    assert [(summary.returned, summary.filtered) for summary in world.rounds] == [(2, 2)]
    assert world.admitter.state.drawn == started and not world.admitter.state.waiting
