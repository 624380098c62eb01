"""How a round is put together, in each mode: its kind, and how many prompts it needs.  Pure functions of the state."""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang_pat.rollout.rules import MODES, Rules
from sglang_pat.rollout.starting import AnyStarting, Starting, StartingShortest, StartingWhereLeft
from sglang_pat.rollout.state import LONG, SHORT, Round, State


class RoundShape(NamedTuple):
    """Kind of a round; prompts under way at most, and samples started for each."""

    kind: str
    prompts: int
    responses: int


NO_LIMIT = 1 << 30


class Strict:
    """Tail batching (RollPacker section 3).

    Short rounds start fresh prompts, more than needed, and keep the first; the others queue.  Long rounds take the
    queue, its oldest first, and nothing more than needed: when it holds a batch, or when a prompt would wait too long.
    """

    keeps = False
    """Whether tokens outlive their round."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def plan(self, state: State, owed: list[int], fresh: int) -> RoundShape:
        """``owed``: see :class:`~.state.Round`; ``fresh``: prompts of the epoch that were never started."""
        rules = self.rules
        if len(state.waiting) >= rules.num_prompts or any(owed) or fresh < rules.num_prompts:
            return RoundShape(LONG, rules.num_prompts, rules.num_responses)
        return RoundShape(SHORT, rules.started_prompts, rules.started_responses)

    def flushes(self, waiting: int, fresh: int) -> bool:
        """Whether what is left of an epoch that has ended is to be finished now."""
        return fresh < self.rules.num_prompts

    def needs(self, state: State, owed: list[int]) -> int:
        """Fresh prompts for a whole round; more than these if some are likely to be useless (``filter_groups``)."""
        plan = self.plan(state, owed, self.rules.num_prompts)
        waiting = 0 if plan.kind == SHORT else len(state.waiting)
        return math.ceil(plan.prompts / state.keep_rate) - waiting

    def starting(self, round_: Round, state: State) -> AnyStarting:
        """What is to be started in a round, from now on."""
        return Starting(round_, state, self.rules.filter_groups)


class Reorder(Strict):
    """verl's recipe "Reorder Rollout": the first complete groups form the batch, the others are recycled.

    Recycled prompts compete again, and those that are expected to be short are started first.  In a round in which some
    are forced by the bound, those that are expected to be long are: they cost no more time there.  Such a round starts
    nothing more than it needs: else the first complete groups would take its free places, and each forced prompt would
    cost a long round of its own.
    """

    def plan(self, state: State, owed: list[int], fresh: int) -> RoundShape:
        rules = self.rules
        if any(owed):
            return RoundShape(LONG, rules.num_prompts, rules.num_responses)
        return RoundShape(SHORT, rules.started_prompts, rules.started_responses)

    def flushes(self, waiting: int, fresh: int) -> bool:
        return waiting + fresh <= self.rules.num_prompts

    def needs(self, state: State, owed: list[int]) -> int:
        plan = self.plan(state, owed, self.rules.num_prompts)
        return math.ceil(plan.prompts / state.keep_rate) - len(state.waiting)

    def starting(self, round_: Round, state: State) -> AnyStarting:
        return StartingShortest(round_, state, self.rules.filter_groups)


class Partial:
    """Partial rollout (verl's recipe "Async Partial Rollout Trainer", APRIL).

    As many samples as the engine is to hold are under way; prompts are supplemented as samples end.  When the batch is
    complete the others are interrupted, keep what they have and go on in the next round.
    """

    keeps = True

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.capacity = rules.started_prompts * rules.num_responses

    def plan(self, state: State, owed: list[int], fresh: int) -> RoundShape:
        return RoundShape(LONG if any(owed) else SHORT, NO_LIMIT, self.rules.num_responses)

    def flushes(self, waiting: int, fresh: int) -> bool:
        return waiting + fresh <= self.rules.num_prompts

    def needs(self, state: State, owed: list[int]) -> int:
        # Samples that end early are supplemented: some prompts more than fit at once.
        return math.ceil(2 * self.rules.started_prompts / state.keep_rate) - len(state.waiting)

    def starting(self, round_: Round, state: State) -> AnyStarting:
        return StartingWhereLeft(round_, self.capacity)


Mode = Strict | Reorder | Partial
BY_NAME: dict[str, type[Mode]] = dict(zip(MODES, (Strict, Reorder, Partial), strict=True))
"""By the name that a job gives (``Rules.mode``)."""
