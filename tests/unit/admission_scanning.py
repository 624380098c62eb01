"""The admitter by its definitions: each call goes through all groups and samples.  Slow; it decides as the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_pat.admission.admitter import Admitter
from sglang_pat.admission.deadlines import Deadlines
from sglang_pat.admission.records import Group, Sample
from sglang_pat.admission.starting import FRESH, Fresh, priority, to_start
from sglang_pat.admission.state import SHORT, Round, State
from sglang_pat.admission.under_way import RoundUnderWay


class ScanningReady:
    """The first complete group, in the order of completion, that may be returned."""

    def __init__(self, admitter: Admitter) -> None:
        self._admitter = admitter

    def completed(self, group: Group) -> None: ...
    def add(self, group: Group, least: int) -> None: ...
    def look_again(self) -> None: ...

    def pop(self, may_take: Callable[[int], bool]) -> int | None:
        round_, bound = self._admitter.state.round, self._admitter.rules.bound
        for order, group in round_.complete.items():
            if self._admitter.rules.mode == "partial":
                age = round_.version - group.oldest if group.oldest is not None else 0
            else:
                age = group.deferrals
            if not group.judging and may_take(bound - age if group.begun else bound + 1):
                return order
        return None


class ScanningStarting:
    """What to start next, from the state as it is now."""

    def __init__(self, mode: str, round_: Round, state: State, capacity: int) -> None:
        self._mode, self._round, self._state, self._capacity = mode, round_, state, capacity

    def joined(self, group: Group) -> None: ...
    def waits(self, group: Group) -> None: ...
    def changed(self, group: Group) -> None: ...

    def _alive(self) -> int:
        return sum(sample.alive for group in self._round.groups for sample in group.samples)

    def next(self, fresh: bool, alive: int) -> Group | Fresh | None:
        round_, waiting = self._round, self._state.waiting
        open_ = [group for group in round_.groups if to_start(round_, group)]
        if self._mode == "partial":
            if self._alive() >= self._capacity:
                return None
            if open_:
                return min(open_, key=lambda g: (g.key not in round_.forced, *priority(g, g.oldest), g.order))
            return FRESH if fresh else None
        under_way = len(round_.groups) + len(round_.taken)
        if open_ or under_way >= round_.prompts:
            return open_[0] if open_ else None
        if self._mode == "strict":
            if waiting and (round_.kind != SHORT or (under_way < round_.target and not fresh)):
                return max(waiting, key=lambda group: (group.deferrals, -group.order))
            return FRESH if fresh else None
        forced = next((group for group in waiting if group.key in round_.forced), None)
        if forced is not None:
            return forced
        number, total = self._state.lengths
        candidates = [(float(group.seen), group.order, group) for group in waiting]
        if fresh:
            candidates.append((total / number if number else 0.0, self._state.fed, FRESH))
        sign = 1 if round_.kind == SHORT else -1
        return min(candidates, key=lambda c: (sign * c[0], c[1]), default=(0, 0, None))[2]

    def samples(self, group: Group, alive: int) -> list[Sample]:
        found = to_start(self._round, group)
        return found[: self._capacity - self._alive()] if self._mode == "partial" else found


class ScanningDeadlines(Deadlines):
    """Ages by what groups hold, debts by counting."""

    def owed(self, ages: list[int]) -> list[int]:
        bound, size = self._rules.bound, self._rules.num_prompts
        left = [bound - age for age in ages]
        return [max(0, sum(least <= j for least in left) - j * size) for j in range(bound + 1)]

    def age(self, group: Group, version: int) -> int:
        if self._rules.mode != "partial":
            return group.deferrals
        return version - group.oldest if group.oldest is not None else 0


class ScanningAdmitter(Admitter):
    """Nothing is kept beside the state."""

    def _watch(self, groups: Iterable[Group]) -> Deadlines:
        return ScanningDeadlines(self.rules, self._mode.keeps, groups)

    def _take_up(self, round_: Round, alive: int, most: int | None = None) -> RoundUnderWay:
        under_way = super()._take_up(round_, alive, most)
        capacity = self.rules.started_prompts * self.rules.num_responses
        under_way._ready = ScanningReady(self)
        under_way._starting = ScanningStarting(self.rules.mode, round_, self.state, capacity)
        return under_way
