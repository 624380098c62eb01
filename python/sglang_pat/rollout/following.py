"""What follows in a round from what has happened: complete groups are returned, samples started, prompts asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from sglang_pat.rollout.deadlines import Deadlines
from sglang_pat.rollout.ending import take_back
from sglang_pat.rollout.modes import NO_LIMIT, Mode
from sglang_pat.rollout.ready import Ready
from sglang_pat.rollout.records import RUNNING, STOPPING, Abort, Action, Group, Launch, More, Return, Sample
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.starting import Fresh, to_start
from sglang_pat.rollout.state import Round, State

ASK_SHARE = 8
"""A round asks for P0 / 8 prompts at least, if it asks for any."""


class Following:
    """The round of ``state.round``, from the moment it is there until it is :attr:`over`.

    Made from the state alone, at any time of the round.  Beside the round's record it keeps what follows from it, so
    that no event has to go through all groups.

    Args:
        deadlines: kept up to date.
        alive: samples that the engine has.
        most: samples to return, to start or to stop in one call, or a group more; None: all.
        borrowed: orders of groups that copies of earlier states have as well: they may not be changed before they are
            :meth:`_owned`.

    Attributes:
        round: its record, part of the state.
        more: whether there is more to do for :meth:`go_on`, see ``most``.
        kept: lengths of the responses returned.
    """

    def __init__(
        self, rules: Rules, state: State, round_: Round, mode: Mode, deadlines: Deadlines, alive: int,
        most: int | None = None, borrowed: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.round = round_
        self._rules, self._state, self._mode, self._deadlines = rules, state, mode, deadlines
        self._most = NO_LIMIT if most is None else most
        self._borrowed = set(borrowed)
        self._to_stop = deque(round_.groups if round_.stopping else ())
        self.more = bool(self._to_stop)
        everyone = round_.everyone
        self.kept = [sample.output.tokens for group in round_.taken for sample in group.kept()]
        self._groups = {group.key: group for group in everyone}
        self._alive = alive
        self._ready = Ready()
        self._starting = mode.starting(round_, state)
        for group in round_.complete.values():
            self._ready.completed(group)
            if not group.judging:
                self._ready.add(group, self._least(group))

    @property
    def over(self) -> bool:
        """Whether nothing of it is in the engine, and nobody is waited for: a full batch needs no more verdicts."""
        round_ = self.round
        if self._alive or self.more:
            return False
        return round_.cancelled or round_.stopping or not (round_.judging or self._awaits_prompts)

    @property
    def _awaits_prompts(self) -> bool:
        return self.round.asked > 0 and not self._dry

    @property
    def _dry(self) -> bool:
        """Whether no other prompts come for this round."""
        return self.round.dry or self.round.epoch in self._state.ended

    def go_on(self) -> list[Action]:
        """Return what is complete, start what may be started, or stop what runs."""
        round_ = self.round
        actions: list[Action] = []
        self.more = False
        if not round_.stopping and not round_.cancelled:
            actions += self._take()
            if len(round_.taken) < round_.target and not self.more:
                actions += self._start() + self._ask()
        if not round_.stopping and (round_.cancelled or len(round_.taken) >= round_.target):
            round_.stopping = True
            self._to_stop.extend(round_.groups)
        if round_.stopping:
            actions += self._stop()
        if round_.cancelled and not self._alive and not self.more:
            self.more = take_back(self._state, round_, self._mode.keeps, self._most)
        return actions

    def _take(self) -> list[Action]:
        """Return groups in the order in which they were completed, as far as older ones do not need the place."""
        round_ = self.round
        actions: list[Action] = []
        responses = 0
        while len(round_.taken) < round_.target:
            if responses >= self._most:
                self.more = self._ready.has(self._may_take)
                break
            order = self._ready.pop(self._may_take)
            if order is None:
                break
            group = self._owned(round_.complete[order])
            self._leave(group, round_.taken)
            self._state.returned += 1
            self.kept += [sample.output.tokens for sample in group.kept()]
            responses += len(group.chosen)
            actions.append(Return(group))
        return actions

    def _may_take(self, least: int) -> bool:
        """Whether enough places remain for the groups that must be in this round if such a one is returned."""
        round_ = self.round
        places = round_.target - len(round_.taken) - 1
        return all(count - (j >= least) <= places for j, count in enumerate(round_.owed))

    def _leave(self, group: Group, where: list[Group]) -> None:
        """A group is returned or filtered."""
        round_ = self.round
        least = self._least(group)
        round_.owed = [max(0, count - (j >= least)) for j, count in enumerate(round_.owed)]
        del round_.complete[group.order]
        where.append(group)
        self._ready.look_again()

    def _least(self, group: Group) -> int:
        """How many more rounds it may wait."""
        return self._deadlines.slack(group, self.round.version, self.round.jump)

    def _start(self) -> list[Action]:
        """As many samples as may be, :attr:`more` than ``most`` in a later call."""
        actions: list[Action] = []
        while True:
            self.more = len(actions) >= self._most
            group = None if self.more else self._next()
            if group is None:
                return actions
            samples = self._starting.samples(group, self._alive)[: self._most - len(actions)]
            actions += [self._launch(group, sample) for sample in samples]
            if to_start(self.round, group):
                self._starting.waits(group)

    def _stop(self) -> list[Action]:
        """Abort what runs, :attr:`more` than ``most`` samples in a later call."""
        actions: list[Action] = []
        while self._to_stop and len(actions) < self._most:
            actions += stop(self._to_stop.popleft())
        self.more = bool(self._to_stop)
        return actions

    def _ask(self) -> list[Action]:
        """For prompts, where some could be started that are not there: so many were useless."""
        round_ = self.round
        if not self._rules.filter_groups or self._dry or self.more or self._has_fresh:
            return []
        lacks = min(self._starting.places(self._alive), round_.room) - round_.asked
        if lacks <= 0:
            return []
        # Not for each one alone; what the round does not start is there for the next one.
        count = max(lacks, -(-self._rules.num_prompts // ASK_SHARE))
        round_.asked += count
        return [More(count)]

    @property
    def _has_fresh(self) -> bool:
        fresh = self._state.fresh
        return bool(fresh) and fresh[0].epoch == self.round.epoch

    def _next(self) -> Group | None:
        """The group of which samples are started now; part of the round from now on."""
        round_, state = self.round, self._state
        group = self._starting.next(self._has_fresh and round_.room > 0, self._alive)
        if isinstance(group, Fresh):
            round_.room -= 1
            state.drawn += 1
            return self._join(state.fresh.pop(0))
        if group is not None and group.order not in round_.open:
            # In the order of arrival: found without looking at all of them.
            del state.waiting[bisect_left(state.waiting, group.order, key=lambda other: other.order)]
            return self._join(group)
        return group if group is None else self._owned(group)

    def _owned(self, group: Group) -> Group:
        """A group of the round that may be changed."""
        if group.order not in self._borrowed:
            return group
        self._borrowed.remove(group.order)
        group = group.own()
        (self.round.complete if group.complete else self.round.open)[group.order] = group
        self._groups[group.key] = group
        return group

    def _join(self, group: Group) -> Group:
        """The group as part of the round."""
        group = group.own()
        self.round.open[group.order] = group
        self._groups[group.key] = group
        group.fill(self.round.responses)
        self._starting.joined(group)
        return group

    def _launch(self, group: Group, sample: Sample) -> Launch:
        sample.state = RUNNING
        sample.attempt += 1
        self._alive += 1
        return Launch(group.id_of(sample), group.prompt, sample.output if sample.output.tokens else None)


def stop(group: Group, first: int = 0) -> list[Action]:
    """Abort what runs of a group, from sample ``first`` on."""
    running = [sample for sample in group.samples[first:] if sample.state == RUNNING]
    for sample in running:
        sample.state = STOPPING
    return [Abort(group.id_of(sample)) for sample in running]
