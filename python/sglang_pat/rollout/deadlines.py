"""Who has to be returned when (:class:`Deadlines`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from sglang_pat.rollout.records import Group, Output
from sglang_pat.rollout.rules import Rules


class Deadlines:
    """How many more rounds groups may wait (their *slack*), and how many groups a round must therefore return.

    In every mode a group may be passed over in ``max_deferrals`` rounds.  Where tokens outlive their round
    (``partial``) its oldest token must also not become older than ``max_staleness`` weight versions.  That is counted
    in rounds, too: from each round to the next as many versions are expected as there were to this one.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def record_output(self, group: Group, output: Output) -> None:
        """Record what a sample of the group has generated."""
        oldest = output.oldest
        if self._rules.keeps and oldest is not None:
            group.oldest = oldest if group.oldest is None else min(group.oldest, oldest)

    def compute_longest_wait(self, jump: int) -> int:
        """Most rounds that a fresh prompt may have to wait; ``jump``: see :class:`~.state.Round`."""
        most = self._rules.max_deferrals
        return min(most, self._rules.max_staleness // jump) if self._rules.keeps else most

    def compute_slack(self, group: Group, version: int, jump: int) -> int:
        """Number of further rounds that may pass a group over, counted from a round with the weights ``version``.

        More than anything for a group that was not begun in an earlier round: see ``Round.room``.
        """
        most = self._rules.max_deferrals
        if not group.begun:
            return most + 1
        return min(most - group.deferrals, self._count_rounds_until_stale(group.oldest, version, jump))

    def _count_rounds_until_stale(self, oldest: int | None, version: int, jump: int) -> int:
        """Rounds until tokens from weights ``oldest`` are too old; negative if they are.

        Those of this round do not count yet: so it is the same at any time of the round, see ``Round.room``.
        """
        if not self._rules.keeps or oldest is None or oldest >= version:
            return self._rules.max_deferrals
        return (self._rules.max_staleness - (version - oldest)) // jump

    def count_due_groups(self, slacks: Sequence[int]) -> list[int]:
        """Number of groups that the next round must return among those that may wait at most j more rounds, by j
        (``Round.owed``).

        There may be j·P0 of them left after it, as many as the j rounds after it return.  Since a round starts no more
        fresh prompts than ``Round.room``, and keeps the places that are owed (``ActiveRound._may_take``), no
        figure here ever exceeds P0: nobody waits longer than the bound.

        Args:
            slacks: rounds that each waiting group may still wait.
        """
        size = self._rules.num_prompts
        left = sorted(slacks)
        last = min(self._rules.max_deferrals, len(left) // size)
        return [max(0, bisect_right(left, j) - j * size) for j in range(last + 1)]

    def check(self, waiting: Sequence[Group]) -> None:
        """Raises ValueError: these rules would have some prompt wait too long.  They must have been changed."""
        rules = self._rules
        deferrals = [group.deferrals for group in waiting]
        if self._is_feasible(deferrals, rules.max_deferrals):
            return
        enough = rules.max_deferrals
        while not self._is_feasible(deferrals, enough):
            enough += 1
        raise ValueError(
            f"num_prompts is {rules.num_prompts} and max_deferrals {rules.max_deferrals}: {len(waiting)} prompts wait, "
            f"and not all can be returned in time; give max_deferrals {enough}, or a larger num_prompts"
        )

    def _is_feasible(self, deferrals: Sequence[int], most: int) -> bool:
        """Whether all groups can be returned, P0 a round, if those go first that may wait least."""
        size = self._rules.num_prompts
        slacks = [max(0, most - count) for count in sorted(deferrals, reverse=True)]
        return all(place // size <= slack for place, slack in enumerate(slacks))

    def drop_stale_tokens(self, waiting: list[Group], version: int, jump: int) -> tuple[list[Group], int]:
        """The groups without tokens that are too old, or will be before a round has room for them; and how many.

        There are such tokens only where weights are updated more often between two rounds than before.
        """
        if not self._rules.keeps:
            return waiting, 0
        slacks = [self.compute_slack(group, version, jump) for group in waiting]
        size, thrown = self._rules.num_prompts, 0
        if min(slacks, default=0) >= 0 and max(self.count_due_groups(slacks)) <= size:
            return waiting, 0
        most = self._rules.max_deferrals
        groups = {group.order: group for group in waiting}
        for rounds in range(-1, most + 1):
            urgent = [group for group in groups.values() if self.compute_slack(group, version, jump) <= rounds]
            too_many = max(0, len(urgent) - (rounds + 1) * size)
            # To throw tokens away helps none that is urgent by its deferrals; but those that are too old have to go.
            by_tokens = sorted((g for g in urgent if rounds < 0 or most - g.deferrals > rounds), key=lambda g: g.tokens)
            for group in by_tokens[:too_many]:
                groups[group.order], tokens = self._drop_stale(group, version, jump, rounds)
                thrown += tokens
        return list(groups.values()), thrown

    def _drop_stale(self, group: Group, version: int, jump: int, rounds: int) -> tuple[Group, int]:
        """A copy without the tokens that will be too old after ``rounds`` rounds, and how many tokens these were."""
        group, thrown = group.copy_for_changes(), 0
        for sample in group.samples:
            if self._count_rounds_until_stale(sample.output.oldest, version, jump) <= rounds and sample.output.tokens:
                thrown += sample.reset()
                group.chosen = [number for number in group.chosen if number != sample.number]
                group.complete = group.useful = False
        group.oldest = group.find_oldest()
        return group, thrown
