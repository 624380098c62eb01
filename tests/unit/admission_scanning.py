"""The admitter by its definitions: each call goes through all groups and samples.  Slow; it decides as the real one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from sglang_pat.rollout import admitter
from sglang_pat.rollout.active_round import ActiveRound
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.deadlines import Deadlines
from sglang_pat.rollout.launch_order import FRESH, NextPrompt, compute_priority, list_unstarted
from sglang_pat.rollout.records import Action, Group, Sample
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import SHORT, Round, State


def slack(rules: Rules, group: Group, version: int, jump: int) -> int:
    """Rounds that may still pass it over."""
    if not group.begun:
        return rules.max_deferrals + 1
    left = rules.max_deferrals - group.deferrals
    oldest = group.find_oldest()
    if rules.mode == "partial" and oldest is not None and oldest < version:
        # The first round that would be too late, by looking at one after the other.
        rounds = -1
        while version + (rounds + 1) * jump - oldest <= rules.max_staleness and rounds < left:
            rounds += 1
        return min(left, rounds) if version - oldest <= rules.max_staleness else -1
    return left


class ScanningCompleted:
    """The first complete group, in the order of completion, that may be returned."""

    def __init__(self, rules: Rules, round_: Round) -> None:
        self._rules, self._round = rules, round_

    def add_last(self, group: Group) -> None: ...
    def add(self, group: Group, least: int) -> None: ...

    def pop(self, may_take: Callable[[int], bool]) -> int | None:
        for order, group in self._round.complete.items():
            if not group.judging and may_take(slack(self._rules, group, self._round.version, self._round.jump)):
                return order
        return None


class ScanningOrder:
    """What to start next, from the state as it is now."""

    def __init__(self, rules: Rules, round_: Round, state: State) -> None:
        self._mode, self._filters, self._round, self._state = rules.mode, rules.filter_groups, round_, state
        self._capacity = rules.started_prompts * rules.num_responses

    def add_waiting(self, group: Group) -> None: ...

    def _alive(self) -> int:
        return sum(sample.alive for group in self._round.groups for sample in group.samples)

    def pick_next(self, fresh: bool, alive: int) -> Group | NextPrompt | None:
        round_, waiting = self._round, self._state.waiting
        open_ = [group for group in round_.groups if list_unstarted(round_, group)]
        if self._mode == "partial":
            if self._alive() >= self._capacity:
                return None
            if open_:
                return min(open_, key=lambda g: (g.key not in round_.forced, *compute_priority(g), g.order))
            return FRESH if fresh else None
        under_way = len(round_.groups) + len(round_.taken)
        if open_ or self.count_free_places(alive) <= 0:
            return min(open_, key=lambda g: g.order, default=None)
        if self._mode == "strict":
            dry = round_.dry or round_.epoch in self._state.ended
            if waiting and (round_.kind != SHORT or (dry and under_way < round_.target and not fresh)):
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

    def count_free_places(self, alive: int) -> int:
        round_ = self._round
        if self._mode == "partial":
            return (self._capacity - self._alive()) // round_.responses
        if not self._filters:
            return round_.prompts - len(round_.groups) - len(round_.taken)
        undecided = [group for group in round_.groups if not group.complete or group.judging]
        missing = round_.target - len(round_.taken) - (len(round_.groups) - len(undecided))
        wanted = missing * round_.prompts / round_.target / self._state.keep_rate
        return math.ceil(round(wanted, 6)) - len(undecided)

    def choose_samples(self, group: Group, alive: int) -> list[Sample]:
        found = list_unstarted(self._round, group)
        return found[: self._capacity - self._alive()] if self._mode == "partial" else found


class ScanningDeadlines(Deadlines):
    """Ages by what groups hold, debts by counting."""

    def count_due_groups(self, slacks: list[int]) -> list[int]:
        bound, size = self._rules.max_deferrals, self._rules.num_prompts
        return [max(0, sum(least <= j for least in slacks) - j * size) for j in range(bound + 1)]

    def compute_slack(self, group: Group, version: int, jump: int) -> int:
        return slack(self._rules, group, version, jump)


class ScanningRound(ActiveRound):
    """Nothing is kept beside its record."""

    def __init__(self, rules: Rules, state: State, *given: Any) -> None:
        super().__init__(rules, state, *given)
        self._completed = ScanningCompleted(rules, self.round)


class ScanningAdmitter(Admitter):
    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._deadlines, self._mode.order = ScanningDeadlines(rules), ScanningOrder

    def begin(self, version: int) -> list[Action]:
        with patch.object(admitter, "ActiveRound", ScanningRound):
            return super().begin(version)
