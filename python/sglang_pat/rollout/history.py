"""The last states of a job, so that a trainer that goes back to its checkpoint finds the prompts as they were then."""

from __future__ import annotations

from sglang_pat.rollout.records import Group
from sglang_pat.rollout.state import State

KEPT = 8
"""Rounds that a job can go back, besides the last one."""


class History:
    """The states at the ends of the last rounds, by the number of the round; -1: before the first."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def add(self, state: State) -> list[Group]:
        """A round is over, or the job is new; the groups that waited in states that are not kept any more."""
        self._states[state.last] = state.copy()
        old = [number for number in self._states if number < state.last - KEPT]
        return [group for number in old for group in self._states.pop(number).waiting]

    def at(self, number: int) -> State | None:
        """A copy; None if it is not there."""
        return self._states[number].copy() if number in self._states else None

    def back_to(self, number: int) -> None:
        """What came after this round has not happened."""
        for later in [other for other in self._states if other > number]:
            del self._states[later]

    @property
    def numbers(self) -> list[int]:
        return sorted(self._states)
