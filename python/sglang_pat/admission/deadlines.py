"""Who has to be returned when: no group that was started waits longer than ``Rules.bound``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from sglang_pat.admission.records import Group, Output
from sglang_pat.admission.rules import Rules


class Deadlines:
    """How old groups are, and how many a round must therefore return.

    An age is the number of rounds that passed the group over; where tokens outlive their round (``partial``), weight
    versions since its oldest token.

    Args:
        keeps: whether tokens outlive their round.
        groups: all that were ever started and have not left.

    Attributes:
        oldest: of these groups, by order: weight version of the oldest token, None without tokens.  Kept up to date
            event by event, so that no group's tokens have to be gone through.
    """

    def __init__(self, rules: Rules, keeps: bool, groups: Iterable[Group]) -> None:
        self._rules, self._keeps = rules, keeps
        self.oldest = {group.order: group.oldest for group in groups}

    def joined(self, group: Group) -> None:
        """It is started, or started again, without tokens."""
        self.oldest[group.order] = None

    def heard(self, group: Group, output: Output) -> None:
        """One of its samples has generated this."""
        if self._keeps and output.oldest is not None:
            oldest = self.oldest[group.order]
            self.oldest[group.order] = output.oldest if oldest is None else min(oldest, output.oldest)

    def left(self, group: Group) -> None:
        """It was returned or filtered, for good."""
        del self.oldest[group.order]

    def age(self, group: Group, version: int) -> int:
        """As of a round with the weights ``version``."""
        if not self._keeps:
            return group.deferrals
        oldest = self.oldest[group.order]
        return version - oldest if oldest is not None else 0

    def least(self, group: Group, version: int) -> int:
        """How many more rounds a group may wait; more than anything for one that was not begun earlier."""
        bound = self._rules.bound
        return bound - self.age(group, version) if group.begun else bound + 1

    def owed(self, ages: list[int]) -> list[int]:
        """Of the groups that may wait at most j more rounds, how many the next one must return (``Round.owed``).

        There may be j·P0 of them left after it, as many as the j rounds after it return.  Since a round starts no more
        fresh prompts than ``Round.room``, and keeps the places that are owed (:meth:`RoundUnderWay._may_take`), no
        figure here ever exceeds P0: nobody waits longer than the bound.

        Args:
            ages: of the groups that wait.
        """
        bound, size = self._rules.bound, self._rules.num_prompts
        left = sorted(bound - age for age in ages)
        return [max(0, bisect_right(left, j) - j * size) for j in range(min(bound, len(left) // size) + 1)]

    def ages(self, waiting: list[Group], version: int) -> tuple[list[int], int]:
        """Of the groups that wait; what is too old for a round of these weights is thrown away: its tokens.

        It is too old where weights were updated more than once between two rounds.
        """
        thrown, ages = 0, []
        for group in waiting:
            age = self.age(group, version)
            if self._keeps and age > self._rules.max_staleness:
                thrown += self._throw_stale(group, version)
                self.oldest[group.order] = group.oldest
                age = self.age(group, version)
            ages.append(age)
        return ages, thrown

    def _throw_stale(self, group: Group, version: int) -> int:
        thrown = 0
        for sample in group.samples:
            oldest = sample.output.oldest
            if oldest is not None and version - oldest > self._rules.max_staleness:
                thrown += sample.reset()
                group.chosen = [number for number in group.chosen if number != sample.number]
                group.complete = group.useful = False
        return thrown
