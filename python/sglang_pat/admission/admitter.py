"""The admitter: a state machine without sockets, tasks or clock.

    feed → begin → Launch … → finished → Return … → Abort … → stopped … → RoundOver → begin …

Every method returns what is to be done (``records.Action``), in order.  What it is told may come in any order and any
number at once; what it does depends on that order only.  Its whole state is one :class:`~.records.State`.

At any time each prompt that was ever started is returned, filtered, waiting or in the round: nothing is lost, nothing
comes twice.  A prompt is passed over in at most ``Rules.bound`` rounds: see :meth:`Admitter._owed`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_pat.admission.modes import MODES, Mode
from sglang_pat.admission.ready import Ready
from sglang_pat.admission.records import (
    DONE,
    FLUSH,
    NEW,
    RUNNING,
    STOPPING,
    Abort,
    Action,
    Group,
    Judge,
    Key,
    Launch,
    Output,
    Return,
    Round,
    RoundOver,
    Sample,
    SampleId,
    State,
    Summary,
)  # fmt: skip
from sglang_pat.admission.rules import Rules
from sglang_pat.admission.starting import FRESH, to_start


class StaleOutput(RuntimeError):
    """Tokens of other weights than the round's: cancel it."""


class Admitter:
    """Decides which prompts run in which round.

    Attributes:
        rules: what is wanted.
        state: everything else.
    """

    def __init__(self, rules: Rules, state: State | None = None) -> None:
        self.rules = rules
        self.state = state or State()
        self._mode: Mode = MODES[rules.mode](rules)
        self._most: int | None = None
        self.more = False
        """Whether samples wait to be started by :meth:`go_on`, see ``most`` of :meth:`begin`."""
        everyone = self.state.round.everyone if self.state.round else []
        self._alive = sum(sample.alive for group in everyone for sample in group.samples)
        self._oldest = {group.order: group.oldest for group in (*everyone, *self.state.waiting)}
        self._look_up()

    def _look_up(self) -> None:
        """What follows from the round's state, kept beside it so that no event has to go through all groups.

        Besides it, ``_alive``: samples under way, and ``_oldest``: of groups begun, weight version of the oldest token.
        """
        round_ = self.state.round
        everyone = round_.everyone if round_ else []
        self._groups = {group.key: group for group in everyone}
        self._judging = sum(group.judging for group in everyone)
        self._kept = [sample.output.tokens for group in (round_.taken if round_ else ()) for sample in group.kept()]
        """Lengths of the responses returned."""
        self._ready = Ready()
        self._starting = self._mode.starting(round_, self.state, self._oldest) if round_ else None
        for group in round_.complete.values() if round_ else ():
            self._ready.completed(group)
            if not group.judging:
                self._ready.add(group, self._least(group))

    # -- prompts ---------------------------------------------------------------------------------------

    def feed(self, prompts: Iterable[tuple[Sequence[int], Any]], end_of: int | None = None) -> None:
        """More prompts, each with a key that never came before; ``end_of``: none of this epoch come after them.

        Raises:
            ValueError: a key that was there already or whose epoch is over; then none of them is taken.
        """
        new = [(Key(*key), prompt) for key, prompt in prompts]
        begun = self.state.round.epoch if self.state.round else min((g.epoch for g in self.state.waiting), default=0)
        state, seen = self.state, {int(epoch): set(indices) for epoch, indices in self.state.known.items()}
        for key, _ in new:
            if key.epoch < max(begun, state.over) or key.epoch in state.ended:
                raise ValueError(f"key {list(key)}: epoch {key.epoch} is over; give a later one")
            indices = seen.setdefault(key.epoch, set())
            if key.index in indices:
                raise ValueError(f"key {list(key)}: was given before; a prompt comes once in an epoch")
            indices.add(key.index)
        for key, prompt in new:
            state.fresh.append(Group(epoch=key.epoch, index=key.index, prompt=prompt, order=state.fed))
            state.known.setdefault(str(key.epoch), []).append(key.index)
            state.fed += 1
        state.fresh.sort(key=_by_epoch)
        if end_of is not None and end_of >= state.over and end_of not in state.ended:
            state.ended.append(end_of)
        self._close_epochs()

    @property
    def epoch(self) -> int | None:
        """The one that prompts are drawn from: it is over before the next one begins.  None without prompts."""
        return min((group.epoch for group in (*self.state.waiting, *self.state.fresh[:1])), default=None)

    @property
    def wanted(self) -> int:
        """Prompts to :meth:`feed` before the next round, so that it can be a whole one; 0 at the end of an epoch."""
        epoch = self.epoch
        if self.state.round is not None or (epoch is not None and epoch in self.state.ended):
            return 0
        ages = [0 if self._mode.keeps else group.deferrals for group in self.state.waiting]
        owed = [0] if self._mode.keeps else self._owed(ages)
        return max(0, self._mode.needs(self.state, owed) - self._fresh(epoch))

    def _fresh(self, epoch: int | None) -> int:
        """Prompts of an epoch that were never started."""
        return sum(group.epoch == epoch for group in self.state.fresh)

    def _close_epochs(self) -> None:
        """Forget the keys of epochs that have ended and of which nothing is left."""
        state = self.state
        while state.ended and state.round is None:
            epoch = min(state.ended)
            if any(group.epoch <= epoch for group in (*state.fresh, *state.waiting)):
                return
            state.ended.remove(epoch)
            state.over = epoch + 1
            state.known = {other: indices for other, indices in state.known.items() if int(other) > epoch}

    # -- a round ---------------------------------------------------------------------------------------

    def begin(self, version: int, most: int | None = None) -> list[Action]:
        """Start a round with the weights ``version``.

        Args:
            most: samples to start in one call, of this or any other method, until the round is over; None: all.  If
                there are :attr:`more`, :meth:`go_on` starts the next.

        Raises:
            ValueError: there are no prompts, or too few of an epoch that has not ended; nothing changes.
            RuntimeError: a round is under way.
        """
        state, rules = self.state, self.rules
        if state.round is not None:
            raise RuntimeError(f"round {state.round.number} is not over")
        epoch = self.epoch
        fresh = self._fresh(epoch)
        total = len(state.waiting) + fresh
        if not total:
            raise ValueError("there are no prompts: feed some")
        if state.version is not None and version < state.version:
            raise ValueError(f"version is {version}, the last round's was {state.version}: it cannot be smaller")
        ended = epoch in state.ended
        if total < rules.num_prompts and not ended:
            raise ValueError(f"{total} prompts for a round of {rules.num_prompts}: feed more, or end epoch {epoch}")
        ages, thrown = self._ages(version)
        owed = self._owed(ages)
        plan = self._mode.plan(state, owed, fresh)
        kind = FLUSH if ended and self._mode.flushes(len(state.waiting), fresh) else plan.kind
        target = min(rules.num_prompts, total)
        oldest = sorted(zip(ages, state.waiting, strict=True), key=lambda pair: (-pair[0], pair[1].order))
        state.round = Round(
            number=sum(state.rounds.values()), epoch=epoch, kind=kind, version=version, target=target,
            prompts=plan.prompts, responses=plan.responses, owed=[min(count, target) for count in owed], thrown=thrown,
            forced=[group.key for _, group in oldest[: max(owed)]],
            room=rules.bound * rules.num_prompts + target - len(state.waiting),
        )  # fmt: skip
        state.version = version
        self._most = most
        actions: list[Action] = []
        if self._mode.keeps:
            # What is complete or half done is part of the round from the start.
            waiting, state.waiting = state.waiting, []
            for group in waiting:
                (state.round.complete if group.complete else state.round.open)[group.order] = group
                self._fill(group)
                if group.complete:
                    actions += self._ask(group)
        self._look_up()
        return actions + self._go_on()

    def go_on(self) -> list[Action]:
        """Start :attr:`more` samples."""
        return self._go_on() if self.state.round is not None else []

    def finished(self, sample: SampleId, output: Output) -> list[Action]:
        """A sample has ended by itself; ``output`` is what came after its prefix.

        Raises:
            StaleOutput: unless in ``partial``, for tokens of other weights than the round's.
        """
        group, mine = self._find(sample)
        if mine is None:
            return []
        late = mine.state == STOPPING and not self._mode.keeps
        if not self._mode.keeps and not late and any(s.version != self.state.round.version for s in output.spans):
            versions = sorted({span.version for span in output.spans})
            of = self.state.round.version
            raise StaleOutput(f"sample {list(sample)}: tokens of weights {versions} in a round of {of}")
        self._heard(group, mine, output)
        if late:
            self._throw(group, mine)
            self._again(group)
            return self._go_on()
        mine.state = DONE
        group.chosen.append(mine.number)
        if len(group.chosen) == self.rules.num_responses:
            actions = self._completed(group)
        else:
            actions = []
            self._starting.changed(group)
        return actions + self._go_on()

    def stopped(self, sample: SampleId, output: Output) -> list[Action]:
        """A sample is out of the engine before its end; ``output`` is what came after its prefix.

        One that nobody wanted to stop is started again.
        """
        group, mine = self._find(sample)
        if mine is None:
            return []
        self._heard(group, mine, output)
        self.state.aborted += 1
        self.state.round.aborted.append(mine.output.tokens)
        if self._mode.keeps:
            mine.state = NEW
        else:
            self._throw(group, mine)
        self._again(group)
        return self._go_on()

    def _heard(self, group: Group, sample: Sample, output: Output) -> None:
        """It is out of the engine."""
        self._alive -= 1
        sample.output = sample.output.followed_by(output)
        if self._mode.keeps and output.oldest is not None:
            oldest = self._oldest[group.order]
            self._oldest[group.order] = output.oldest if oldest is None else min(oldest, output.oldest)

    def _again(self, group: Group) -> None:
        """One of its samples is out of the engine unfinished."""
        if not group.complete and not self.state.round.stopping:
            self._starting.waits(group)

    def judged(self, key: Sequence[int], keep: bool, reward: float | None = None) -> list[Action]:
        """The verdict on a group of :class:`~.records.Judge`: a useless one leaves for good.

        ``reward``: mean of its responses, for the summary only.
        """
        group = self._groups.get(Key(*key))
        if group is None or not group.judging:
            return []
        group.judging, group.useful, group.reward = False, keep, reward
        self._judging -= 1
        if keep:
            self._ready.add(group, self._least(group))
        else:
            self._leave(group, self.state.round.filtered)
            self.state.filtered += 1
            self.state.round.room += 1
        return self._go_on()

    def cancel(self) -> list[Action]:
        """Give the round up: when it is over it will not have happened, but for the tokens that it cost.

        Prompts are where they were before it, those that were returned in it too; in ``partial`` what was generated is
        kept.
        """
        if self.state.round is None:
            return []
        self.state.round.cancelled = True
        return self._go_on()

    def engine_lost(self) -> list[Action]:
        """No engine has anything of the round under way any more: it is cancelled, and over."""
        actions = self.cancel()
        round_ = self.state.round
        for group in () if round_ is None else round_.everyone:
            for sample in [sample for sample in group.samples if sample.alive]:
                actions += self.stopped(_id(group, sample), Output())
        return actions

    # -- what a round does -----------------------------------------------------------------------------

    def _go_on(self) -> list[Action]:
        """Take what is complete, start what may be started, or end the round."""
        round_, actions = self.state.round, []
        if not round_.stopping and not round_.cancelled:
            actions += self._take()
            if len(round_.taken) < round_.target:
                actions += self._start()
        if not round_.stopping and (round_.cancelled or len(round_.taken) >= round_.target):
            round_.stopping = True
            actions += [abort for group in round_.groups for abort in self._stop(group)]
        judging = self._judging and not round_.cancelled
        return actions if self._alive or judging else [*actions, self._over()]

    def _take(self) -> list[Action]:
        """Return groups in the order in which they were completed, as far as older ones do not need the place."""
        round_, actions = self.state.round, []
        while len(round_.taken) < round_.target and (order := self._ready.pop(self._may_take)) is not None:
            group = round_.complete[order]
            self._leave(group, round_.taken)
            self.state.returned += 1
            self._kept += [sample.output.tokens for sample in group.kept()]
            actions.append(Return(group))
        return actions

    def _start(self) -> list[Action]:
        round_, state, starting = self.state.round, self.state, self._starting
        actions: list[Action] = []
        while True:
            self.more = self._most is not None and len(actions) >= self._most
            if self.more:
                return actions
            ready = bool(state.fresh) and state.fresh[0].epoch == round_.epoch and round_.room > 0
            group = starting.next(ready, self._alive)
            if group is None:
                return actions
            if group is FRESH:
                group = state.fresh.pop(0)
                round_.room -= 1
                state.drawn += 1
                self._join(group)
            elif group.order not in round_.open:
                # In the order of arrival: found without looking at all of them.
                del state.waiting[bisect_left(state.waiting, group.order, key=lambda other: other.order)]
                self._join(group)
            samples = starting.samples(group, self._alive)
            if self._most is not None:
                samples = samples[: self._most - len(actions)]
            actions += [self._launch(group, sample) for sample in samples]
            if to_start(round_, group):
                starting.waits(group)

    def _join(self, group: Group) -> None:
        """A group becomes part of the round."""
        self.state.round.open[group.order] = group
        self._groups[group.key] = group
        self._oldest[group.order] = None
        self._fill(group)
        self._starting.joined(group)

    def _fill(self, group: Group) -> None:
        """As many samples as are started of each in this round."""
        group.samples += [Sample(number=n) for n in range(len(group.samples), self.state.round.responses)]

    def _launch(self, group: Group, sample: Sample) -> Launch:
        sample.state = RUNNING
        sample.attempt += 1
        self._alive += 1
        return Launch(_id(group, sample), group.prompt, sample.output if sample.output.tokens else None)

    def _stop(self, group: Group) -> list[Action]:
        running = [sample for sample in group.samples if sample.state == RUNNING]
        for sample in running:
            sample.state = STOPPING
        return [Abort(_id(group, sample)) for sample in running]

    def _completed(self, group: Group) -> list[Action]:
        group.complete = True
        round_ = self.state.round
        round_.complete[group.order] = round_.open.pop(group.order)
        self._ready.completed(group)
        actions = self._ask(group)
        if group.judging:
            self._judging += 1
        else:
            self._ready.add(group, self._least(group))
        return actions + self._stop(group)

    def _ask(self, group: Group) -> list[Action]:
        """For the verdict on a complete group, where one is wanted and was not given."""
        group.judging = self.rules.filter_groups and not group.useful
        return [Judge(group)] if group.judging else []

    def _leave(self, group: Group, where: list[Group]) -> None:
        """A group is returned or filtered."""
        round_ = self.state.round
        least = self._least(group)
        round_.owed = [max(0, count - (j >= least)) for j, count in enumerate(round_.owed)]
        del round_.complete[group.order]
        where.append(group)
        self._ready.look_again()

    def _throw(self, group: Group, sample: Sample) -> None:
        """Throw away what a sample generated."""
        tokens = sample.reset()
        self.state.round.thrown += tokens
        group.seen = max(group.seen, tokens)

    def _over(self) -> RoundOver:
        """Nothing of the round is in the engine: groups that are left wait for another one."""
        state, round_ = self.state, self.state.round
        deferred, cancelled = round_.groups, round_.cancelled
        kept = self._kept
        if cancelled:
            state.returned -= len(round_.taken)
            state.filtered -= len(round_.filtered)
        else:
            state.rounds[round_.kind] = state.rounds.get(round_.kind, 0) + 1
            state.lengths = [state.lengths[0] + len(kept), state.lengths[1] + sum(kept)]
        for group in () if cancelled else (*round_.taken, *round_.filtered):
            del self._oldest[group.order]
        for group in round_.everyone if cancelled else deferred:
            self._put_back(group)
        if cancelled:
            state.fresh.sort(key=_by_epoch)
        state.waiting.sort(key=lambda group: group.order)
        if not cancelled:
            for group in state.waiting:
                group.deferrals += 1
        state.thrown += round_.thrown
        state.round, self.more = None, False
        self._look_up()
        self._close_epochs()
        return RoundOver(
            Summary(
                number=round_.number,
                kind=round_.kind,
                version=round_.version,
                target=round_.target,
                returned=0 if cancelled else len(round_.taken),
                filtered=0 if cancelled else len(round_.filtered),
                deferred=0 if cancelled else len(deferred),
                thrown=round_.thrown,
                cancelled=cancelled,
                drawn=state.drawn,
                kept_lengths=[] if cancelled else kept,
                aborted_lengths=round_.aborted,
                kept_rewards=[] if cancelled else _rewards(round_.taken),
                filtered_rewards=[] if cancelled else _rewards(round_.filtered),
                ages=[group.deferrals for group in state.waiting],
            )  # fmt: skip
        )

    def _put_back(self, group: Group) -> None:
        state = self.state
        group.judging = False
        anew = state.round.cancelled and not group.begun and not (self._mode.keeps and group.tokens)
        if anew or not self._mode.keeps:
            for sample in group.samples:
                if sample.state != NEW or sample.output.spans:
                    self._throw(group, sample)
            group.chosen, group.complete, group.useful = [], False, False
        if anew:
            state.drawn -= 1
            state.fresh.append(group)
        else:
            group.begun = True
            state.waiting.append(group)

    def _find(self, sample: SampleId) -> tuple[Group, Sample] | tuple[None, None]:
        """The sample, if this attempt at it is in the engine as far as we know."""
        sample = SampleId(*sample)
        group = self._groups.get(sample.key)
        if group is None or sample.number >= len(group.samples):
            return None, None
        found = group.samples[sample.number]
        return (group, found) if found.alive and found.attempt == sample.attempt else (None, None)

    # -- who has to be returned when -------------------------------------------------------------------

    def _age(self, group: Group, version: int) -> int:
        """Rounds that passed a group over; in ``partial``, weight versions since its oldest token."""
        if not self._mode.keeps:
            return group.deferrals
        oldest = self._oldest[group.order]
        return version - oldest if oldest is not None else 0

    def _least(self, group: Group) -> int:
        """How many more rounds a group may wait; more than anything for one that was not begun earlier."""
        bound = self.rules.bound
        return bound - self._age(group, self.state.round.version) if group.begun else bound + 1

    def _owed(self, ages: list[int]) -> list[int]:
        """Of the groups that may wait at most j more rounds, how many the next one must return (``Round.owed``).

        There may be j·P0 of them left after it, as many as the j rounds after it return.  Since a round starts no more
        fresh prompts than ``Round.room``, and keeps the places that are owed (:meth:`_may_take`), no figure here ever
        exceeds P0: nobody waits longer than the bound.

        Args:
            ages: of the groups that wait.
        """
        bound, size = self.rules.bound, self.rules.num_prompts
        left = sorted(bound - age for age in ages)
        return [max(0, bisect_right(left, j) - j * size) for j in range(min(bound, len(left) // size) + 1)]

    def _may_take(self, least: int) -> bool:
        """Whether enough places remain for the groups that must be in this round if such a one is returned."""
        round_ = self.state.round
        places = round_.target - len(round_.taken) - 1
        return all(count - (j >= least) <= places for j, count in enumerate(round_.owed))

    def _ages(self, version: int) -> tuple[list[int], int]:
        """Of the groups that wait; what is too old for a round of these weights is thrown away: its tokens.

        It is too old where weights were updated more than once between two rounds.
        """
        thrown, ages, keeps = 0, [], self._mode.keeps
        for group in self.state.waiting:
            age = self._age(group, version)
            if keeps and age > self.rules.max_staleness:
                thrown += self._throw_stale(group, version)
                self._oldest[group.order] = group.oldest
                age = self._age(group, version)
            ages.append(age)
        return ages, thrown

    def _throw_stale(self, group: Group, version: int) -> int:
        thrown = 0
        for sample in group.samples:
            oldest = sample.output.oldest
            if oldest is not None and version - oldest > self.rules.max_staleness:
                thrown += sample.reset()
                group.chosen = [number for number in group.chosen if number != sample.number]
                group.complete = group.useful = False
        return thrown


def _rewards(groups: list[Group]) -> list[float]:
    return [group.reward for group in groups if group.reward is not None]


def _by_epoch(group: Group) -> tuple[int, int]:
    return group.epoch, group.order


def _id(group: Group, sample: Sample) -> SampleId:
    return SampleId(*group.key, sample.number, sample.attempt)
