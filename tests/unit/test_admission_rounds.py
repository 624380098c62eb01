"""The admitter: which prompts run in which round, by hand."""

from __future__ import annotations

import pytest

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Judge, Output, PromptKey, Span
from sglang_pat.rollout.rules import Rules

from .admission_world import Clock, World, dumps, strict, whole_epoch

pytestmark = pytest.mark.unit


def test_a_short_round_starts_more_and_keeps_the_first():
    """Prompts 1 and 4 are long; six are started with three samples each, of which two are kept."""

    def length(key: PromptKey, number: int) -> int:
        return 100 + key.index if key.index in (1, 4) else 5 + number + key.index

    world = World(strict(), length)
    world.feed(0, range(20))
    summary = Clock(world).round()
    assert (summary.kind, world.returned) == (
        "short",
        [PromptKey(0, 0), PromptKey(0, 2), PromptKey(0, 3), PromptKey(0, 5)],
    )
    assert len(world.launched) == 6 * 3
    assert [group.key for group in world.admitter.state.waiting] == [PromptKey(0, 1), PromptKey(0, 4)]
    assert summary.ages == [1, 1]
    assert sorted(summary.kept_lengths) == [5, 6, 7, 8, 8, 9, 10, 11]


def test_a_long_round_takes_the_queue_when_it_holds_a_batch():
    def length(key: PromptKey, number: int) -> int:
        return 100 if key.index % 3 == 0 else 5

    world = World(strict(), length)
    world.feed(0, range(60))
    clock = Clock(world)
    kinds = [clock.round().kind for _ in range(4)]
    assert kinds == ["short", "short", "long", "short"]
    assert world.returned[8:12] == [PromptKey(0, 0), PromptKey(0, 3), PromptKey(0, 6), PromptKey(0, 9)]
    assert len(world.launched) == 2 * 18 + 8 + 18, "a long round starts nothing more than it needs"


def test_a_prompt_that_was_passed_over_too_often_makes_a_long_round():
    def length(key: PromptKey, number: int) -> int:
        return 100 if key.index == 0 else 5

    world = World(strict(eta_prompts=1.25, max_deferrals=3), length)
    world.feed(0, range(60))
    clock = Clock(world)
    kinds = [clock.round().kind for _ in range(5)]
    assert kinds == ["short", "short", "short", "long", "short"]
    assert world.returned[12] != PromptKey(0, 0)
    assert PromptKey(0, 0) in world.returned[12:16], "the others of a batch come from the fresh ones"


def test_the_same_prompts_come_again_in_the_next_epoch():
    world = whole_epoch(strict(), 10)
    world.feed(1, range(10), end=True)
    clock = Clock(world)
    while world.admitter.state.fresh or world.admitter.state.waiting:
        clock.round()
    assert sorted(world.returned) == [PromptKey(epoch, index) for epoch in (0, 1) for index in range(10)]


@pytest.mark.parametrize(
    ("keys", "said"),
    [([(0, 3), (0, 3)], "was given before"), ([(0, 4), (0, 0)], "was given before"), ([(1, 0)], "epoch 1 is over")],
)
def test_keys_that_came_before_are_refused_whole(keys, said):
    admitter = Admitter(strict())
    admitter.feed([((0, 0), None)])
    admitter.feed([], end_of=1)
    before = dumps(admitter)
    with pytest.raises(ValueError, match=said):
        admitter.feed([(key, None) for key in keys])
    assert dumps(admitter) == before


def test_too_few_prompts_are_said():
    admitter = Admitter(strict())
    assert admitter.wanted == 6
    with pytest.raises(ValueError, match="there are no prompts"):
        admitter.begin(0)
    admitter.feed([((0, index), None) for index in range(3)])
    assert admitter.wanted == 3
    with pytest.raises(ValueError, match="3 prompts for a round of 4: feed more, or end epoch 0"):
        admitter.begin(0)


def test_a_full_batch_waits_for_no_verdict():
    """The group without one comes again; a verdict that is late changes nothing."""
    world = World(strict(filter_groups=True, num_responses=1, eta_responses=1.0, num_prompts=1, eta_prompts=2.0))
    world.feed(0, range(4))
    world.begin()
    first, second = list(world.running)
    world.finish(first)
    world.finish(second)
    world.judge(first.key, True)
    assert [summary.returned for summary in world.rounds] == [1]
    assert [group.key for group in world.admitter.state.waiting] == [second.key]
    assert not world.admitter.record_verdict(second.key, False)
    assert not world.filtered


@pytest.mark.parametrize(("staleness", "order"), [(4, [0, 3, 4, 1, 2]), (3, [0, 3, 1, 2, 4])])
def test_interrupted_samples_go_on_where_they_were(staleness, order):
    """Capacity for three groups of one; each round keeps the first.

    With a bound of 3 the third round must return 1 or 2: in the fourth both would have to be returned.
    """
    rules = Rules(mode="partial", num_prompts=1, num_responses=1, eta_prompts=3.0, max_staleness=staleness)
    lengths = {0: 4, 1: 10, 2: 11, 3: 3, 4: 2}
    world = World(rules, lambda key, number: lengths[key.index])
    world.feed(0, range(5), end=True)
    clock = Clock(world)
    for _ in range(5):
        clock.round()
    assert [key.index for key in world.returned] == order
    assert world.admitter.state.thrown == 0
    assert world.made == sum(lengths.values())


def test_what_is_too_old_is_started_again():
    """Weights that are updated twice between two rounds."""
    rules = Rules(mode="partial", num_prompts=1, num_responses=1, eta_prompts=2.0, max_staleness=1)
    world = World(rules, lambda key, number: 4 if key.index == 0 else 10)
    world.feed(0, range(2), end=True)
    clock = Clock(world)
    clock.round()
    world.version += 1
    clock.round()
    assert world.admitter.state.thrown == 4
    assert world.made == 4 + 4 + 10


def test_expected_long_prompts_are_grouped():
    """reorder: with a bound of 2, what was passed over twice is forced, and with it go those that look long."""

    def length(key: PromptKey, number: int) -> int:
        return 100 if key.index in (0, 1, 2) else 5

    rules = Rules(mode="reorder", num_prompts=4, num_responses=1, eta_prompts=1.75, max_deferrals=2)
    world = World(rules, length)
    world.feed(0, range(40))
    clock = Clock(world)
    kinds = [clock.round().kind for _ in range(3)]
    assert kinds == ["short", "short", "long"]
    assert {PromptKey(0, 0), PromptKey(0, 1), PromptKey(0, 2)} <= set(world.returned[8:12])


def test_a_group_without_a_verdict_is_judged_when_the_next_round_begins():
    """partial keeps complete groups; without a good verdict they are not returned."""
    rules = Rules(mode="partial", num_prompts=1, num_responses=1, eta_prompts=2.0, filter_groups=True)
    admitter = Admitter(rules)
    admitter.feed([((0, index), None) for index in range(2)], end_of=0)
    first, second = [action.sample for action in admitter.begin(0)]
    assert admitter.record_finished(first._replace(number=1), Output()) == [], "earlier rounds may have had such a one"
    for sample in (first, second):
        admitter.record_finished(sample, Output(spans=[Span(0, 3)], finish_reason="stop"))
    admitter.record_verdict(first.key, True)
    (asked,) = admitter.begin(0)
    assert isinstance(asked, Judge) and asked.group.key == second.key


def test_too_many_useless_groups_are_made_up_for_from_the_queue():
    world = World(strict(filter_groups=True, eta_prompts=1.25, max_deferrals=9), lambda key, number: 5 + key.index)
    world.feed(0, range(5))
    clock = Clock(world, useful=lambda key: key.index < 5 or key.index > 7)
    clock.round()
    assert [group.key.index for group in world.admitter.state.waiting] == [4]
    world.feed(0, range(5, 9), end=True)
    summary = clock.round()
    assert (summary.kind, summary.filtered) == ("short", 3)
    assert world.returned[4:] == [PromptKey(0, 8), PromptKey(0, 4)]


def test_versions_do_not_go_back():
    admitter = Admitter(strict(eta_prompts=1.0, eta_responses=1.0))
    admitter.feed([((0, index), None) for index in range(8)])
    for action in admitter.begin(3):
        admitter.record_finished(action.sample, Output(spans=[Span(3, 1)], finish_reason="stop"))
    before = dumps(admitter)
    with pytest.raises(ValueError, match="version is 2, the last round's was 3"):
        admitter.begin(2)
    assert dumps(admitter) == before
