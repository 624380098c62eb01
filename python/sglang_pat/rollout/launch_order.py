"""How a round is put together, in each mode (:class:`Strict`, :class:`Reorder`, :class:`Partial`): its kind, how many
prompts it needs (:class:`RoundShape`), and which sample is started next.

The modes are pure functions of the state.  The order of launches is kept up to date event by event, so that nothing is
scanned.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, NamedTuple

from sglang_pat.rollout.records import DONE, NEW, Group, Sample
from sglang_pat.rollout.rules import MODES, Rules
from sglang_pat.rollout.state import LONG, SHORT, Round, State


class NextPrompt:
    """The next prompt that was never started, in place of a group."""


FRESH = NextPrompt()


class LaunchOrder:
    """What to start next: samples of groups that are in the round already, then other groups.

    Made when the round begins, and told what happens in it.
    """

    def __init__(self, rules: Rules, round_: Round, state: State) -> None:
        self._rules, self._round, self._state = rules, round_, state
        self._heap: list[tuple[Any, ...]] = []
        self._waiting: set[int] = set()
        for group in round_.open.values():
            self.add_waiting(group)

    def add_waiting(self, group: Group) -> None:
        """Queue a group that may have samples to start, with its priority of this moment."""
        if group.order not in self._waiting:
            self._waiting.add(group.order)
            heapq.heappush(self._heap, (*self._get_priority(group), group.order))

    def _get_priority(self, group: Group) -> tuple[Any, ...]:
        """Sort key of a group, the smallest first; groups with equal keys go by arrival."""
        return ()

    def _pop(self) -> Group | None:
        """The first group with samples to start."""
        while self._heap:
            order = heapq.heappop(self._heap)[-1]
            self._waiting.remove(order)
            group = self._round.open.get(order)
            if group is not None and list_unstarted(self._round, group):
                return group
        return None


class QueueFirst(LaunchOrder):
    """``strict``: what was stopped unasked first, then the queue or fresh prompts, as many as the round may have."""

    def __init__(self, rules: Rules, round_: Round, state: State) -> None:
        super().__init__(rules, round_, state)
        # The queue changes between rounds only; the last is next.
        self._queue = self._order(state.waiting)

    def _order(self, waiting: list[Group]) -> list[Group]:
        return sorted(waiting, key=lambda group: (group.deferrals, -group.order))

    def pick_next(self, fresh: bool, alive: int) -> Group | NextPrompt | None:
        """Choose what to start now.

        Args:
            fresh: whether a fresh prompt may be.
            alive: samples under way.
        """
        return self._pop() or (self._choose(fresh) if self.count_free_places(alive) > 0 else None)

    def count_free_places(self, alive: int) -> int:
        """Number of prompts that may be started beside those that are under way."""
        round_ = self._round
        under_way = len(round_.open) + len(round_.complete) + len(round_.taken)
        if not self._rules.filter_groups:
            return round_.prompts - under_way
        # As many as will hardly be too few for the places that are free, if as many are useless as before.
        missing = round_.target - len(round_.taken) - (len(round_.complete) - round_.judging)
        prompts = missing * round_.prompts / round_.target / self._state.keep_rate
        return math.ceil(round(prompts, 6)) - len(round_.open) - round_.judging

    def _choose(self, fresh: bool) -> Group | NextPrompt | None:
        round_ = self._round
        under_way = len(round_.open) + len(round_.complete) + len(round_.taken)
        # So many were useless, and no other prompts come.
        short_of = under_way < round_.target and (round_.dry or round_.epoch in self._state.ended)
        if self._queue and (round_.kind != SHORT or (short_of and not fresh)):
            return self._queue.pop()
        return FRESH if fresh else None

    def choose_samples(self, group: Group, alive: int) -> list[Sample]:
        """Samples to start of a group that was just picked."""
        return list_unstarted(self._round, group)


class ShortestFirst(QueueFirst):
    """``reorder``: those that must be in the round, then those that look short, or long if the round is a long one."""

    def __init__(self, rules: Rules, round_: Round, state: State) -> None:
        self._sign = 1 if round_.kind == SHORT else -1
        self._forced = set(round_.forced)
        self._usual = state.lengths[1] / state.lengths[0] if state.lengths[0] else 0.0
        super().__init__(rules, round_, state)

    def _get_sort_key(self, group: Group) -> tuple[bool, float, int]:
        forced = group.key in self._forced
        return not forced, 0.0 if forced else self._sign * float(group.seen), group.order

    def _order(self, waiting: list[Group]) -> list[Group]:
        return sorted(waiting, key=self._get_sort_key, reverse=True)

    def _choose(self, fresh: bool) -> Group | NextPrompt | None:
        usual = (True, self._sign * self._usual, self._state.fed)
        if fresh and (not self._queue or self._get_sort_key(self._queue[-1]) > usual):
            return FRESH
        return self._queue.pop() if self._queue else None


class ResumedFirst(LaunchOrder):
    """``partial``: half done groups in the order of :func:`compute_priority`, then fresh ones, while there is room."""

    def __init__(self, rules: Rules, round_: Round, state: State) -> None:
        self._capacity = rules.started_prompts * rules.num_responses
        self._forced = set(round_.forced)
        super().__init__(rules, round_, state)

    def _get_priority(self, group: Group) -> tuple[Any, ...]:
        return group.key not in self._forced, *compute_priority(group)

    def pick_next(self, fresh: bool, alive: int) -> Group | NextPrompt | None:
        """See :meth:`QueueFirst.pick_next`."""
        if alive >= self._capacity:
            return None
        return self._pop() or (FRESH if fresh else None)

    def count_free_places(self, alive: int) -> int:
        """See :meth:`QueueFirst.count_free_places`."""
        return (self._capacity - alive) // self._round.responses

    def choose_samples(self, group: Group, alive: int) -> list[Sample]:
        """See :meth:`QueueFirst.choose_samples`."""
        return list_unstarted(self._round, group)[: self._capacity - alive]


def list_unstarted(round_: Round, group: Group) -> list[Sample]:
    """Samples of a group that is not complete which wait to be started."""
    if group.complete:
        return []
    first, end = group.rejected * round_.responses, group.draws * round_.responses
    return [sample for sample in group.samples[first:end] if sample.state == NEW]


def compute_priority(group: Group) -> tuple[int, float, int]:
    """Priority of resuming a group in ``partial``, smallest first (after the recipe's ``get_scheduling_priority``).

    Few unfinished samples, short finished ones (unknown: last), old tokens first.  The recipe has new tokens
    first; here old ones have a bound to keep.
    """
    done = [sample.output.tokens for sample in group.samples if sample.state == DONE]
    mean = sum(done) / len(done) if done else 1e9
    return len(group.samples) - len(done), mean, group.oldest if group.oldest is not None else 1 << 62


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

    Attributes:
        order: what is to be started in a round.
    """

    order: type[QueueFirst | ResumedFirst] = QueueFirst

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def plan(self, state: State, owed: list[int], fresh: int) -> RoundShape:
        """``owed``: see :class:`~.state.Round`; ``fresh``: prompts of the epoch that were never started."""
        rules = self.rules
        if len(state.waiting) >= rules.num_prompts or any(owed) or fresh < rules.num_prompts:
            return RoundShape(LONG, rules.num_prompts, rules.num_responses)
        return RoundShape(SHORT, rules.started_prompts, rules.started_responses)

    def should_flush(self, waiting: int, fresh: int) -> bool:
        """Whether what is left of an epoch that has ended is to be finished now."""
        return fresh < self.rules.num_prompts

    def count_needed(self, state: State, owed: list[int]) -> int:
        """Number of fresh prompts for a whole round; more than these if some are likely to be useless
        (``filter_groups``)."""
        plan = self.plan(state, owed, self.rules.num_prompts)
        waiting = 0 if plan.kind == SHORT else len(state.waiting)
        return math.ceil(plan.prompts / state.keep_rate) - waiting


class Reorder(Strict):
    """verl's recipe "Reorder Rollout": the first complete groups form the batch, the others are recycled.

    Recycled prompts compete again, and those that are expected to be short are started first.  In a round in which some
    are forced by the bound, those that are expected to be long are: they cost no more time there.  Such a round starts
    nothing more than it needs: else the first complete groups would take its free places, and each forced prompt would
    cost a long round of its own.
    """

    order = ShortestFirst

    def plan(self, state: State, owed: list[int], fresh: int) -> RoundShape:
        rules = self.rules
        if any(owed):
            return RoundShape(LONG, rules.num_prompts, rules.num_responses)
        return RoundShape(SHORT, rules.started_prompts, rules.started_responses)

    def should_flush(self, waiting: int, fresh: int) -> bool:
        return waiting + fresh <= self.rules.num_prompts

    def count_needed(self, state: State, owed: list[int]) -> int:
        plan = self.plan(state, owed, self.rules.num_prompts)
        return math.ceil(plan.prompts / state.keep_rate) - len(state.waiting)


class Partial(Reorder):
    """Partial rollout (verl's recipe "Async Partial Rollout Trainer", APRIL).

    As many samples as the engine is to hold are under way; prompts are supplemented as samples end.  When the batch is
    complete the others are interrupted, keep what they have and go on in the next round.
    """

    order = ResumedFirst

    def plan(self, state: State, owed: list[int], fresh: int) -> RoundShape:
        return RoundShape(LONG if any(owed) else SHORT, NO_LIMIT, self.rules.num_responses)

    def count_needed(self, state: State, owed: list[int]) -> int:
        # Samples that end early are supplemented: some prompts more than fit at once.
        return math.ceil(2 * self.rules.started_prompts / state.keep_rate) - len(state.waiting)


BY_NAME: dict[str, type[Strict]] = dict(zip(MODES, (Strict, Reorder, Partial), strict=True))
"""Orders by the name that a job gives (``Rules.mode``)."""
