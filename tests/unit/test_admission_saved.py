"""The admitter's rules, and its state in a file."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import State

from .admission_world import Clock, World, dumps, loads, strict
from .drawn import examples

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "loose"), ("num_prompts", 0), ("num_responses", 0), ("eta_prompts", 0.9), ("eta_responses", 0.5),
        ("eta_prompts", float("nan")), ("max_deferrals", -1), ("max_staleness", -1),
    ],
)  # fmt: skip
def test_bad_rules_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is "):
        strict(**{field: value})


def test_every_response_counts_in_partial():
    with pytest.raises(ValueError, match="eta_responses is 1.5, must be 1 in partial"):
        strict(mode="partial")


def test_products_are_rounded_up_once():
    rules = Rules(num_prompts=10, num_responses=8, eta_prompts=1.1, eta_responses=1.25)
    assert (rules.started_prompts, rules.started_responses) == (11, 10)


@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
def test_a_round_of_a_process_that_is_gone_has_not_happened(mode):
    rules = Rules(mode=mode, num_prompts=2, num_responses=2, eta_prompts=2.0, max_staleness=3)
    world = World(rules)
    world.feed(0, range(12))
    clock = Clock(world)
    clock.round()
    before = dumps(world.admitter)
    world.begin()
    world.finish(next(iter(world.running)))
    world.feed(0, [12])
    again = Admitter(rules)
    again.load_state_dict(world.admitter.state_dict() | {"rows": "of somebody else"})
    expected = loads(before)
    expected.feed([((0, 12), "prompt 12")])
    assert dumps(again) == dumps(expected)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not the state of an admitter"), (b"{}", "not the state"), (b"\xff", "not the state"),
        (b'{"version": 99, "rules": {"num_prompts": 1, "num_responses": 1}, "state": {}}', "version 99"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(content, said):
    with pytest.raises(ValueError, match=said) as error:
        Admitter(strict()).load_state_dict({"admitter": content}, "step 3/state.pt")
    assert "step 3/state.pt" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_state_of_another_mode_is_refused():
    data = dumps(Admitter(strict()))
    with pytest.raises(ValueError, match="^mode is 'partial'"):
        loads(data, Rules(mode="partial", num_prompts=1, num_responses=1))


def test_group_size_cannot_change_under_half_done_groups():
    rules = Rules(mode="partial", num_prompts=1, num_responses=2, eta_prompts=2.0)
    world = World(rules)
    world.feed(0, range(4))
    Clock(world).round()
    data = dumps(world.admitter)
    with pytest.raises(ValueError, match="^num_responses is 1"):
        loads(data, Rules(mode="partial", num_prompts=1, num_responses=1))
    assert loads(data, Rules(mode="partial", num_prompts=3, num_responses=2)).rules.num_prompts == 3


def test_a_round_that_is_under_way_is_not_replaced():
    world = World(strict())
    world.feed(0, range(8))
    saved = world.admitter.state_dict()
    world.begin()
    with pytest.raises(RuntimeError, match="round 0 is not over"):
        world.admitter.load_state_dict(saved)


@examples(60)
@given(
    mode=st.sampled_from(["strict", "reorder", "partial"]), seed=st.integers(0, 1000), filtering=st.booleans(),
    leave=st.integers(0, 40),
)  # fmt: skip
def test_what_happens_to_the_admitter_does_not_change_a_copy(mode, seed, filtering, leave):
    """Groups are shared with copies of the state: none may change, in whole rounds or in one that is given up."""
    rules = Rules(mode=mode, num_prompts=4, num_responses=2, max_staleness=3, filter_groups=filtering)
    world, fed = World(rules), 0
    clock = Clock(world, useful=lambda key: hash((key, seed)) % 3 > 0)
    copies: list[tuple[State, bytes]] = []
    for _ in range(5):
        wanted = world.admitter.wanted
        world.feed(0, range(fed, fed + wanted))
        fed += wanted
        copies.append((world.admitter.make_snapshot(), dumps(world.admitter)))
        clock.round()
    world.feed(0, range(fed, fed + 9))
    before = world.admitter.make_snapshot()
    copies.append((before, dumps(world.admitter)))
    world.begin()
    for _ in range(leave):
        if world.running:
            world.finish(next(iter(world.running)))
        if world.judging:
            world.judge(world.judging[0], seed % 2 > 0)
    world.cancel()
    for sample in list(world.stopping):
        world.stop(sample, 1)
    for state, data in copies:
        assert dumps(Admitter(rules, state)) == data
    if world.rounds[-1].cancelled:
        assert msgspec.structs.replace(world.admitter.state, thrown=before.thrown) == before
