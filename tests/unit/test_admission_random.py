"""The admitter: random rules and lengths against a slow reference, and events in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_pat.rollout.records import PromptKey
from sglang_pat.rollout.rules import Rules

from .admission_reference import rounds as reference_rounds
from .admission_world import Clock, World, dumps
from .drawn import examples

pytestmark = pytest.mark.unit


def any_rules(mode: str, **given) -> Rules:
    """``unbiased`` is ``strict`` with that, and with no more responses than are needed."""
    if mode == "unbiased":
        return Rules(mode="strict", unbiased=True, **given | {"eta_responses": 1.0})
    return Rules(mode=mode, **given)


# -- against a reference -------------------------------------------------------------------------------------


all_rules = st.builds(
    any_rules,
    mode=st.sampled_from(["strict", "reorder", "unbiased"]),
    num_prompts=st.integers(1, 6),
    num_responses=st.integers(1, 4),
    eta_prompts=st.sampled_from([1.0, 1.1, 1.25, 1.5, 2.0, 3.0]),
    eta_responses=st.sampled_from([1.0, 1.25, 2.0]),
    max_deferrals=st.integers(0, 4),
)


@examples(300)
@given(rules=all_rules, prompts=st.integers(1, 40), salt=st.integers(0, 1000), spread=st.integers(1, 60))
def test_rounds_are_those_of_the_reference(rules: Rules, prompts: int, salt: int, spread: int):
    def length(key: PromptKey, number: int) -> int:
        return 1 + hash((key.index, number, salt)) % spread ** (1 + (key.index + salt) % 3)

    world = World(rules, length)
    world.feed(0, range(prompts), end=True)
    found = []
    clock = Clock(world)
    while world.admitter.state.fresh or world.admitter.state.waiting:
        before = len(world.returned)
        summary = clock.round()
        found.append((summary.kind, world.returned[before:], summary.thrown))
    assert found == reference_rounds(rules, 0, list(range(prompts)), length)


# -- anything may happen -------------------------------------------------------------------------------------


class Anything(RuleBasedStateMachine):
    """Events in any order; :class:`World` checks after each that nothing is lost, doubled or too old."""

    @initialize(
        mode=st.sampled_from(["strict", "reorder", "partial", "unbiased"]),
        prompts=st.integers(1, 4), responses=st.integers(1, 3),
        eta=st.sampled_from([1.0, 1.25, 1.5, 2.5]), bound=st.integers(0, 3), filtering=st.booleans(),
    )  # fmt: skip
    def start(self, mode, prompts, responses, eta, bound, filtering):
        self.world = World(
            any_rules(
                mode=mode, num_prompts=prompts, num_responses=responses, eta_prompts=eta, max_deferrals=bound,
                max_staleness=bound, filter_groups=filtering,
            )
        )  # fmt: skip
        self.next = [0, 0]
        self.changed = False

    def _idle(self) -> bool:
        return self.world.admitter.state.round is None

    @rule(count=st.integers(1, 9), end=st.booleans())
    def feed(self, count, end):
        epoch, index = self.next
        self.world.feed(epoch, range(index, index + count), end=end)
        self.next = [epoch + 1, 0] if end else [epoch, index + count]

    @precondition(_idle)
    @rule(jump=st.integers(0, 2))
    def begin(self, jump):
        self.world.version += jump * (jump > 1)
        before = dumps(self.world.admitter)
        try:
            self.world.begin()
        except ValueError as error:
            assert self.changed or "not all can be returned in time" not in str(error)
            assert dumps(self.world.admitter) == before
            assert self.changed or self.world.admitter.wanted > 0 or self.world.admitter.epoch is None

    @precondition(_idle)
    @rule(prompts=st.integers(1, 4), bound=st.integers(0, 3), staleness=st.integers(0, 3))
    def change_rules(self, prompts, bound, staleness):
        self.world.change(num_prompts=prompts, max_deferrals=bound, max_staleness=staleness)
        self.changed = True

    @rule(picks=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=6))
    def finish(self, picks):
        for pick in picks:
            if self.world.running:
                self.world.finish(list(self.world.running)[pick % len(self.world.running)])

    @rule(picks=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=6), tokens=st.integers(0, 9))
    def stop(self, picks, tokens):
        for pick in picks:
            if self.world.stopping:
                self.world.stop(self.world.stopping[pick % len(self.world.stopping)], tokens)

    @rule(pick=st.integers(0, 1 << 16), tokens=st.integers(0, 9))
    def aborted_by_somebody_else(self, pick, tokens):
        if self.world.running:
            self.world.stop(list(self.world.running)[pick % len(self.world.running)], tokens)

    @rule(pick=st.integers(0, 1 << 16), keep=st.booleans())
    def judge(self, pick, keep):
        if self.world.judging:
            self.world.judge(self.world.judging[pick % len(self.world.judging)], keep)

    @rule()
    def cancel(self):
        self.world.cancel()

    @rule()
    def save_and_restore(self):
        self.world.save_and_restore()

    @invariant()
    def accounted(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """Whatever happened, what is left can be finished."""
        if not hasattr(self, "world"):
            return
        world = self.world
        epoch, index = self.next
        world.feed(epoch, range(index, index + 1), end=True)
        if world.admitter.state.round is None:
            world.change(max_deferrals=max(world.bound, world.admitter.state.fed))
        for _ in range(400 * world.admitter.state.fed):  # a prompt may be started in several rounds, in 63 draws
            if world.admitter.state.round is None:
                if not (world.admitter.state.fresh or world.admitter.state.waiting):
                    break
                world.begin()
            elif world.judging:
                world.judge(world.judging[0], True)
            elif world.running:
                world.finish(next(iter(world.running)))
        assert len(world.returned) + len(world.filtered) == world.admitter.state.fed


TestAnything = Anything.TestCase
TestAnything.settings = settings(examples(150), stateful_step_count=60)
