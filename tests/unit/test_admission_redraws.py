"""Redraws of deferred prompts under the condition that deferred them (``Rules.unbiased``), and what is said of bias."""

from __future__ import annotations

import random

import pytest

from sglang_pat.rollout import redraws
from sglang_pat.rollout.estimates import DrawnLengths
from sglang_pat.rollout.records import DONE, Group, Output, Span
from sglang_pat.rollout.rules import Rules

from .admission_world import AGAIN, Clock, World, strict, whole_epoch

pytestmark = pytest.mark.unit

RULES = {"num_prompts": 1, "num_responses": 2, "eta_prompts": 2.0, "eta_responses": 1.0, "unbiased": True}
"""Two prompts in a short round, of which the second is deferred in what follows; then a long round of that one."""


def after_a_short_round(length, **given) -> World:
    """Prompt 1 was passed over when its responses had 10 tokens; ``length``: by number of its redraws' responses."""

    def of(key, number):
        if key.index != 1:
            return 10
        return 1000 if number < 2 else length(number - AGAIN if number >= AGAIN else number)

    world = World(Rules(**RULES | given), of)
    world.feed(0, range(2), end=True)
    assert Clock(world).round().returned == 1
    assert [group.floors for group in world.admitter.state.waiting] == [[10, 10]]
    return world


def list_started(world: World) -> list[int]:
    return [sample.number for sample in world.running]


def test_a_redraw_that_would_not_have_been_deferred_is_rejected_and_more_are_drawn():
    world = after_a_short_round(lambda number: 11 if number == 9 else 3)
    world.begin()
    counts = []
    while world.running:
        counts.append(len(world.running))
        for sample in list(world.running):
            if sample in world.running:
                world.finish(sample)
    assert counts == [2, 4, 8], "one draw, then two, then four"
    summary = world.rounds[-1]
    assert (summary.kept_lengths, summary.redraws, summary.gave_up) == ([3, 11], 4, 0)
    assert summary.thrown == 8 * 3 + 4 * 3, "four were rejected, two had been made for nothing"


def test_the_lowest_draw_that_is_not_rejected_wins_whichever_ends_first():
    world = after_a_short_round(lambda number: {2: 3, 3: 500, 4: 11, 5: 11}.get(number, 3))
    world.begin()
    for _ in range(2):
        world.finish(next(iter(world.running)))
    assert list_started(world) == [2, 3, 4, 5]
    third, fourth, *higher = world.running
    for sample in (third, *higher):
        world.finish(sample)
    assert world.running and not world.batch, "the higher one has all it needs, and waits for the lower one"
    world.finish(fourth)
    assert world.rounds[-1].kept_lengths == [3, 500]


def test_higher_draws_are_stopped_as_soon_as_a_lower_one_is_known_to_be_kept():
    world = after_a_short_round(lambda number: {2: 300, 3: 500}.get(number, 3))
    world.begin()
    for _ in range(2):
        world.finish(next(iter(world.running)))
    first, second, *higher = world.running
    world.finish(higher[0])
    world.finish(first)
    assert world.stopping == higher[1:]
    world.stop(higher[1], 2)
    assert list_started(world) == [3], "what was stopped is not started again"
    world.finish(second)
    assert world.rounds[-1].kept_lengths == [300, 500]
    assert world.rounds[-1].thrown == 2 * 3 + 3 + 2


def test_the_last_draw_is_accepted_as_it_is_and_counted():
    world = after_a_short_round(lambda number: 3)
    most = Clock(world).round()
    assert (most.returned, most.gave_up, most.redraws) == (1, 1, redraws.MOST - 1)
    assert most.thrown == (redraws.MOST - 1) * 2 * 3
    assert most.kept_lengths == [3, 3]


def test_without_the_rule_the_first_redraw_is_kept():
    summary = Clock(after_a_short_round(lambda number: 3, unbiased=False)).round()
    assert (summary.kept_lengths, summary.redraws, summary.thrown) == ([3, 3], 0, 0)


def test_each_sample_has_the_floor_that_it_reached():
    """One had not begun, one had ended, one was aborted."""

    def length(key, number):
        return 10 if key.index == 0 else (7, 500, 500)[number]

    world = World(Rules(**RULES | {"num_responses": 3}), length)
    world.feed(0, range(2), end=True)
    world.begin()
    mine = [sample for sample in world.running if sample.index == 1]
    world.finish(mine[0])
    for sample in [sample for sample in world.running if sample.index == 0]:
        world.finish(sample)
    world.stop(mine[1], 9)
    world.stop(mine[2], 0)
    assert [group.floors for group in world.admitter.state.waiting] == [[9, 9, 0]]


def test_a_response_that_its_limit_has_ended_counts_as_longer():
    group = Group(epoch=0, index=0, floors=[10, 10])
    group.fill(2)
    for sample, reason in zip(group.samples, ("stop", "length"), strict=True):
        sample.state, sample.output = DONE, Output(spans=[Span(0, 3)], finish_reason=reason)
    assert redraws.reject_and_redraw(group, 2) == 0
    assert redraws.complete(group, 2)
    assert (group.rejected, group.draws) == (0, 1)


def test_saved_and_restored_after_every_round_it_goes_on_in_the_same_way():
    def length(key, number):
        return random.Random(f"{tuple(key)} {number}").choice([3, 5, 8, 9, 30])

    rules = strict(unbiased=True, eta_responses=1.0, num_responses=3)
    plain, restored = whole_epoch(rules, 120, length), World(rules, length)
    restored.feed(0, range(120), end=True)
    clock = Clock(restored)
    while restored.admitter.state.fresh or restored.admitter.state.waiting:
        clock.round()
        restored.save_and_restore()
    assert sum(summary.redraws for summary in plain.rounds) > 10
    assert restored.rounds == plain.rounds
    assert restored.launched == plain.launched


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "reorder"}, "unbiased is for mode strict, not reorder"),
        ({"mode": "partial"}, "unbiased is for mode strict, not partial"),
        ({"eta_responses": 1.25}, "eta_responses is 1.25, must be 1 if unbiased"),
    ],
)
def test_where_it_cannot_hold_it_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Rules(num_prompts=4, num_responses=2, unbiased=True, **given)
    assert Rules(num_prompts=4, num_responses=4, unbiased=True).started_responses == 4


# -- what is said of bias ------------------------------------------------------------------------------------


def test_without_anything_thrown_away_the_estimate_is_the_mean():
    world = whole_epoch(strict(eta_prompts=1.0, eta_responses=1.0), 40)
    last = world.rounds[-1]
    assert last.mean_returned > 0
    assert last.mean_undropped == pytest.approx(last.mean_returned)


@pytest.mark.long
def test_the_estimate_is_what_the_returned_lengths_should_have_been():
    """Lengths of one distribution: what is returned is a third too short, and the summary says so within 10%."""

    def length(key, number):
        return 1 + int(random.Random(f"{tuple(key)} {number}").expovariate(1 / 200))

    last = whole_epoch(strict(num_prompts=16, num_responses=4), 192, length).rounds[-1]
    assert last.mean_returned < 160
    assert last.mean_undropped == pytest.approx(200, rel=0.1)


def test_a_sample_counts_from_its_floor_on():
    """Ten first draws, five cut at 64; of their redraws those above it say how it goes on."""
    drawn = DrawnLengths()
    for _ in range(5):
        drawn.add_sample(8, True, 0)
        drawn.add_sample(64, False, 0)
    assert drawn.estimate_mean() == (8, 0, 4), "nothing longer has ended yet: half of it is the least that can be"
    for tokens in (16, 64, 1024, 1024):
        drawn.add_sample(tokens, True, 64)
    mean, variance, unseen = drawn.estimate_mean()
    assert (mean, unseen) == ((8 + 1024) / 2, 0)
    assert variance**0.5 == pytest.approx(10**-0.5 * (1024 - 8) / 2), "of ten throws of a coin"
