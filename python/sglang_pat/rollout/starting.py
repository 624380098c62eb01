"""Which sample of a round is started next, in each mode; kept up to date event by event, so that nothing is scanned."""

from __future__ import annotations

import heapq
import itertools
import math

from sglang_pat.rollout.records import DONE, NEW, Group, Sample
from sglang_pat.rollout.state import SHORT, Round, State


class Fresh:
    """Instead of a group: the next prompt that was never started."""


FRESH = Fresh()


class Starting:
    """``strict``: what was stopped unasked first, then the queue or fresh prompts, as many as the round may have.

    Made from the state alone, at any time of the round.

    Args:
        filters: whether some groups will turn out to be useless.
    """

    def __init__(self, round_: Round, state: State, filters: bool) -> None:
        self._round = round_
        self._state = state
        self._filters = filters
        self._joined: dict[int, int] = {}
        self._stopped: list[tuple[int, int]] = []
        """Heap of those groups of the round that have samples to start: (when it joined, its order)."""
        self._again: set[int] = set()
        # The queue changes between rounds only; the last is next.
        self._queue = self._ordered(state.waiting)
        for group in round_.open.values():
            self.joined(group)
            self.waits(group)

    def _ordered(self, waiting: list[Group]) -> list[Group]:
        return sorted(waiting, key=lambda group: (group.deferrals, -group.order))

    def joined(self, group: Group) -> None:
        """It is part of the round from now on."""
        self._joined[group.order] = len(self._joined)

    def waits(self, group: Group) -> None:
        """It may have samples to start."""
        if group.order not in self._again:
            self._again.add(group.order)
            heapq.heappush(self._stopped, (self._joined[group.order], group.order))

    def changed(self, group: Group) -> None:
        """One of its samples has ended."""

    def next(self, fresh: bool, alive: int) -> Group | Fresh | None:
        """What to start now.

        Args:
            fresh: whether a fresh prompt may be.
            alive: samples under way.
        """
        while self._stopped:
            _, order = heapq.heappop(self._stopped)
            self._again.remove(order)
            group = self._round.open.get(order)
            if group is not None and to_start(self._round, group):
                return group
        return self._choose(fresh) if self.places(alive) > 0 else None

    def places(self, alive: int) -> int:
        """Prompts that may be started beside those that are."""
        round_ = self._round
        under_way = len(round_.open) + len(round_.complete) + len(round_.taken)
        if not self._filters:
            return round_.prompts - under_way
        # As many as will hardly be too few for the places that are free, if as many are useless as before.
        missing = round_.target - len(round_.taken) - (len(round_.complete) - round_.judging)
        wanted = missing * round_.prompts / round_.target / self._state.keep_rate
        return math.ceil(round(wanted, 6)) - len(round_.open) - round_.judging

    def _choose(self, fresh: bool) -> Group | Fresh | None:
        round_ = self._round
        under_way = len(round_.open) + len(round_.complete) + len(round_.taken)
        # So many were useless, and no other prompts come.
        short_of = under_way < round_.target and (round_.dry or round_.epoch in self._state.ended)
        if self._queue and (round_.kind != SHORT or (short_of and not fresh)):
            return self._queue.pop()
        return FRESH if fresh else None

    def samples(self, group: Group, alive: int) -> list[Sample]:
        """Of a group that was just picked, those to start."""
        return to_start(self._round, group)


class StartingShortest(Starting):
    """``reorder``: those that must be in the round, then those that look short, or long if the round is a long one."""

    def __init__(self, round_: Round, state: State, filters: bool) -> None:
        self._sign = 1 if round_.kind == SHORT else -1
        self._forced = set(round_.forced)
        self._usual = state.lengths[1] / state.lengths[0] if state.lengths[0] else 0.0
        super().__init__(round_, state, filters)

    def _rank(self, group: Group) -> tuple[bool, float, int]:
        forced = group.key in self._forced
        return not forced, 0.0 if forced else self._sign * float(group.seen), group.order

    def _ordered(self, waiting: list[Group]) -> list[Group]:
        return sorted(waiting, key=self._rank, reverse=True)

    def _choose(self, fresh: bool) -> Group | Fresh | None:
        usual = (True, self._sign * self._usual, self._state.fed)
        if fresh and (not self._queue or self._rank(self._queue[-1]) > usual):
            return FRESH
        return self._queue.pop() if self._queue else None


class StartingWhereLeft:
    """``partial``: half done groups in the order of :func:`priority`, then fresh ones, while there is room.

    Args:
        capacity: samples under way at most.
    """

    def __init__(self, round_: Round, capacity: int) -> None:
        self._round = round_
        self._capacity = capacity
        self._forced = set(round_.forced)
        self._stamps: dict[int, int] = {}
        """Of each group with samples to start, which of its entries counts: its priority changes as samples end."""
        self._heap: list[tuple[bool, float, float, int, int, int]] = []
        self._counter = itertools.count()
        for group in round_.open.values():
            self.waits(group)

    def joined(self, group: Group) -> None:
        """It is part of the round from now on."""

    def waits(self, group: Group) -> None:
        """It may have samples to start."""
        stamp = self._stamps[group.order] = next(self._counter)
        entry = (group.key not in self._forced, *priority(group), group.order, stamp)
        heapq.heappush(self._heap, entry)

    def changed(self, group: Group) -> None:
        """One of its samples has ended."""
        if group.order in self._stamps:
            self.waits(group)

    def next(self, fresh: bool, alive: int) -> Group | Fresh | None:
        """See :meth:`Starting.next`."""
        if alive >= self._capacity:
            return None
        while self._heap:
            *_, order, stamp = heapq.heappop(self._heap)
            if self._stamps.get(order) != stamp:
                continue
            del self._stamps[order]
            group = self._round.open.get(order)
            if group is not None and to_start(self._round, group):
                return group
        return FRESH if fresh else None

    def places(self, alive: int) -> int:
        """See :meth:`Starting.places`."""
        return (self._capacity - alive) // self._round.responses

    def samples(self, group: Group, alive: int) -> list[Sample]:
        """See :meth:`Starting.samples`."""
        return to_start(self._round, group)[: self._capacity - alive]


AnyStarting = Starting | StartingWhereLeft


def to_start(round_: Round, group: Group) -> list[Sample]:
    """Samples of a group that is not complete which wait to be started."""
    if group.complete:
        return []
    first, end = group.rejected * round_.responses, group.draws * round_.responses
    return [sample for sample in group.samples[first:end] if sample.state == NEW]


def priority(group: Group) -> tuple[int, float, int]:
    """Of resuming a group in ``partial``, smallest first (after the recipe's ``get_scheduling_priority``).

    Few unfinished samples, short finished ones (unknown: last), old tokens first.  The recipe has new tokens
    first; here old ones have a bound to keep.
    """
    done = [sample.output.tokens for sample in group.samples if sample.state == DONE]
    mean = sum(done) / len(done) if done else 1e9
    return len(group.samples) - len(done), mean, group.oldest if group.oldest is not None else 1 << 62
