"""How a round is put together: what is started next, in each mode.  Pure functions of the state."""

from __future__ import annotations

from typing import NamedTuple

from sglang_pat.admission.records import DONE, LONG, NEW, SHORT, Group, Round, Sample, State
from sglang_pat.admission.rules import Rules


class Plan(NamedTuple):
    """Kind of a round; prompts under way at most, and samples started for each."""

    kind: str
    prompts: int
    responses: int


class Fresh:
    """Instead of a group: the next prompt that was never started."""


FRESH = Fresh()


class Strict:
    """Tail batching (RollPacker section 3).

    Short rounds start fresh prompts, more than needed, and keep the first; the others queue.  Long rounds take the
    queue, its oldest first, and nothing more than needed: when it holds a batch, or when a prompt would wait too long.
    """

    keeps = False
    """Whether tokens outlive their round."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def plan(self, state: State, owed: list[int], fresh: int) -> Plan:
        """``owed``: see :class:`~.records.Round`; ``fresh``: prompts of the epoch that were never started."""
        rules = self.rules
        if len(state.waiting) >= rules.num_prompts or any(owed) or fresh < rules.num_prompts:
            return Plan(LONG, rules.num_prompts, rules.num_responses)
        return Plan(SHORT, rules.started_prompts, rules.started_responses)

    def flushes(self, waiting: int, fresh: int) -> bool:
        """Whether what is left of an epoch that has ended is to be finished now."""
        return fresh < self.rules.num_prompts

    def needs(self, state: State, owed: list[int]) -> int:
        """Fresh prompts for a whole round."""
        plan = self.plan(state, owed, self.rules.num_prompts)
        return plan.prompts if plan.kind == SHORT else self.rules.num_prompts - len(state.waiting)

    def next(self, round_: Round, state: State, fresh: bool) -> Group | Fresh | None:
        """What to start now; ``fresh``: whether a fresh prompt may be."""
        if len(round_.groups) + len(round_.taken) >= round_.prompts:
            return None
        short_of = len(round_.groups) + len(round_.taken) < round_.target and not fresh  # so many were useless
        if state.waiting and (round_.kind != SHORT or short_of):
            return max(state.waiting, key=lambda group: (group.deferrals, -group.order))
        return FRESH if fresh else None

    def samples(self, round_: Round, group: Group) -> list[Sample]:
        """Of a group that was just picked, those to start."""
        return to_start(round_, group)


class Reorder(Strict):
    """verl's recipe "Reorder Rollout": the first complete groups form the batch, the others are recycled.

    Recycled prompts compete again: those that are expected to be short first, but in a round in which some are forced
    by the bound, those expected to be long, which then cost no more time.
    """

    def plan(self, state: State, owed: list[int], fresh: int) -> Plan:
        rules = self.rules
        return Plan(LONG if any(owed) else SHORT, rules.started_prompts, rules.started_responses)

    def flushes(self, waiting: int, fresh: int) -> bool:
        return waiting + fresh <= self.rules.num_prompts

    def needs(self, state: State, owed: list[int]) -> int:
        return self.rules.started_prompts - len(state.waiting)

    def next(self, round_: Round, state: State, fresh: bool) -> Group | Fresh | None:
        if len(round_.groups) + len(round_.taken) >= round_.prompts:
            return None
        forced = next((group for group in state.waiting if group.key in round_.forced), None)
        if forced is not None:
            return forced
        usual = state.lengths[1] / state.lengths[0] if state.lengths[0] else 0.0
        candidates = [(float(group.seen), group.order, group) for group in state.waiting]
        if fresh:
            candidates.append((usual, state.fed, FRESH))
        if not candidates:
            return None
        sign = 1 if round_.kind == SHORT else -1
        return min(candidates, key=lambda c: (sign * c[0], c[1]))[2]


class Partial:
    """Partial rollout (verl's recipe "Async Partial Rollout Trainer", APRIL).

    As many samples as the engine is to hold are under way; prompts are supplemented as samples end.  When the batch is
    complete the others are interrupted, keep what they have and go on in the next round.
    """

    keeps = True

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.capacity = rules.started_prompts * rules.num_responses

    def plan(self, state: State, owed: list[int], fresh: int) -> Plan:
        return Plan(LONG if any(owed) else SHORT, len(state.waiting) + fresh, self.rules.num_responses)

    def flushes(self, waiting: int, fresh: int) -> bool:
        return waiting + fresh <= self.rules.num_prompts

    def needs(self, state: State, owed: list[int]) -> int:
        # Samples that end early are supplemented: some prompts more than fit at once.
        return 2 * self.rules.started_prompts - len(state.waiting)

    def _free(self, round_: Round) -> int:
        return self.capacity - sum(sample.alive for group in round_.groups for sample in group.samples)

    def next(self, round_: Round, state: State, fresh: bool) -> Group | Fresh | None:
        if self._free(round_) <= 0:
            return None
        open_ = [group for group in round_.groups if to_start(round_, group)]
        if open_:
            return min(open_, key=lambda group: (group.key not in round_.forced, *priority(group), group.order))
        return FRESH if fresh else None

    def samples(self, round_: Round, group: Group) -> list[Sample]:
        return to_start(round_, group)[: self._free(round_)]


def to_start(round_: Round, group: Group) -> list[Sample]:
    """Samples of a group that is not complete which wait to be started."""
    return [] if group.complete else [s for s in group.samples[: round_.responses] if s.state == NEW]


def priority(group: Group) -> tuple[int, float, int]:
    """Of resuming a group in ``partial``, smallest first (the recipe's ``get_scheduling_priority``).

    Few unfinished samples, short finished ones (unknown: last), old tokens first.
    """
    done = [sample.output.tokens for sample in group.samples if sample.state == DONE]
    mean = sum(done) / len(done) if done else 1e9
    oldest = group.oldest
    return len(group.samples) - len(done), mean, oldest if oldest is not None else 1 << 62


Mode = Strict | Reorder | Partial
MODES = {"strict": Strict, "reorder": Reorder, "partial": Partial}
