"""A round from its beginning to its end: what ends is noted, complete groups are returned, samples started and stopped.

Made from the state alone, at any time of the round.  Beside the round's record (:class:`~.state.Round`) it keeps what
follows from it, so that no event has to go through all groups.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from sglang_pat.rollout import redraws
from sglang_pat.rollout.deadlines import Deadlines
from sglang_pat.rollout.estimates import note_sample
from sglang_pat.rollout.launch_order import NO_LIMIT, Fresh, Mode, to_start
from sglang_pat.rollout.records import (
    DONE,
    NEW,
    RUNNING,
    STOPPING,
    Abort,
    Action,
    Group,
    Judge,
    Key,
    Launch,
    More,
    Output,
    Return,
    Sample,
    SampleId,
    Summary,
)  # fmt: skip
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import FLUSH, Round, State

ASK_SHARE = 8
"""A round asks for P0 / 8 prompts at least, if it asks for any."""

REMEMBERED = 0.75
"""Weight of a round's verdicts in the round after it: what is useless changes as the policy learns."""


class StaleOutput(RuntimeError):
    """Tokens of other weights than the round's: cancel it."""


class CompletedGroups:
    """Complete groups that may be returned, found without going through those that may not: by how many more rounds
    they may wait, each class in the order of completion."""

    def __init__(self) -> None:
        self._completed: dict[int, int] = {}
        self._classes: dict[int, list[tuple[int, int]]] = {}
        self._look = False

    def completed(self, group: Group) -> None:
        """It is the last to have been completed."""
        self._completed[group.order] = len(self._completed)

    def add(self, group: Group, least: int) -> None:
        """It may be returned; ``least``: how many more rounds it may wait."""
        heapq.heappush(self._classes.setdefault(least, []), (self._completed[group.order], group.order))
        self._look = True

    def look_again(self) -> None:
        """What may be returned has changed."""
        self._look = True

    def has(self, may_take: Callable[[int], bool]) -> bool:
        """Whether there is one for :meth:`pop`."""
        return self._class(may_take) is not None

    def pop(self, may_take: Callable[[int], bool]) -> int | None:
        """The order of the first completed of those whose class may be taken now; None if there is none."""
        least = self._class(may_take)
        return None if least is None else heapq.heappop(self._classes[least])[1]

    def _class(self, may_take: Callable[[int], bool]) -> int | None:
        if not self._look:
            return None
        found = [(heap[0], least) for least, heap in self._classes.items() if heap and may_take(least)]
        self._look = bool(found)
        return min(found)[1] if found else None


def open_round(
    rules: Rules, state: State, mode: Mode, deadlines: Deadlines, version: int
) -> tuple[Round, list[Action]]:
    """A round with the weights ``version``, which is ``state.round`` from now on; and what is to be done at once.

    Raises:
        ValueError: there are no prompts, or too few of an epoch that has not ended; nothing changes.
        RuntimeError: a round is under way.
    """
    epoch, fresh = _may_begin(rules, state, version)
    deadlines.check(state.waiting)
    jump = 1 if state.version is None else max(1, version - state.version)
    state.waiting, thrown = deadlines.throw_stale(state.waiting, version, jump)
    slacks = [deadlines.slack(group, version, jump) for group in state.waiting]
    owed = deadlines.owed(slacks)
    plan = mode.plan(state, owed, fresh)
    flushes = epoch in state.ended and mode.flushes(len(state.waiting), fresh)
    target = min(rules.num_prompts, len(state.waiting) + fresh)
    urgent = sorted(zip(slacks, state.waiting, strict=True), key=lambda pair: (pair[0], pair[1].order))
    round_ = state.round = Round(
        number=state.last + 1, epoch=epoch, kind=FLUSH if flushes else plan.kind, version=version,
        target=target, prompts=plan.prompts, responses=plan.responses, owed=[min(count, target) for count in owed],
        jump=jump, thrown=thrown, forced=[group.key for _, group in urgent[: max(owed)]],
        room=deadlines.bound(jump) * rules.num_prompts + target - len(state.waiting),
    )  # fmt: skip
    state.version = version
    return round_, _take_over(rules, state, round_) if mode.keeps else []


def _may_begin(rules: Rules, state: State, version: int) -> tuple[int, int]:
    """The epoch, and the number of its prompts that were never started; raises as :func:`open_round`."""
    if state.round is not None:
        raise RuntimeError(f"round {state.round.number} is not over")
    epoch = state.epoch
    if epoch is None:
        raise ValueError("there are no prompts: feed some")
    if state.version is not None and version < state.version:
        raise ValueError(f"version is {version}, the last round's was {state.version}: it cannot be smaller")
    fresh = state.fresh_of(epoch)
    total = len(state.waiting) + fresh
    if total < rules.num_prompts and epoch not in state.ended:
        raise ValueError(f"{total} prompts for a round of {rules.num_prompts}: feed more, or end epoch {epoch}")
    return epoch, fresh


def _take_over(rules: Rules, state: State, round_: Round) -> list[Action]:
    """What is complete or half done is part of the round from the start, and not copied but to be judged."""
    waiting, state.waiting = state.waiting, []
    actions: list[Action] = []
    for group in waiting:
        if group.complete and rules.filter_groups and not group.useful:
            group = group.own()
            actions += _ask_verdict(rules, round_, group)
        (round_.complete if group.complete else round_.open)[group.order] = group
    return actions


def _ask_verdict(rules: Rules, round_: Round, group: Group) -> list[Action]:
    """For the verdict on a complete group, where one is wanted and was not given."""
    group.judging = rules.filter_groups and not group.useful
    round_.judging += group.judging
    return [Judge(group)] if group.judging else []


class ActiveRound:
    """The round of ``state.round``, told what happens in it; each method returns what is to be done.

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
        self._completed = CompletedGroups()
        self._order = mode.order(round_, state)
        for group in round_.complete.values():
            self._completed.completed(group)
            if not group.judging:
                self._completed.add(group, self._least(group))

    # -- what happens ----------------------------------------------------------------------------------

    def finished(self, sample: SampleId, output: Output) -> list[Action]:
        """See :meth:`Admitter.finished`."""
        found = self._find(sample)
        if found is None:
            return []
        group, mine = found
        if self.round.stopping:
            mine.state = STOPPING  # if not yet, then in one of the next slices
        late = mine.state == STOPPING and not self._mode.keeps
        if not self._mode.keeps and not late:
            self._check_version(sample, output)
        self._heard(group, mine, output)
        note_sample(self.round.drawn, group, mine, True, self._rules.num_responses)
        if late:
            self.round.thrown += group.throw(mine)
            self._again(group)
            return self.go_on()
        mine.state = DONE
        self._state.cost.note(mine.output)
        group.chosen.append(mine.number)
        if self._rules.unbiased and group.floors:
            return self._redrawn(group) + self.go_on()
        if len(group.chosen) == self._rules.num_responses:
            return self._complete(group) + self.go_on()
        self._order.changed(group)
        return self.go_on()

    def stopped(self, sample: SampleId, output: Output) -> list[Action]:
        """See :meth:`Admitter.stopped`."""
        found = self._find(sample)
        if found is None:
            return []
        group, mine = found
        self._heard(group, mine, output)
        self._state.aborted += 1
        self.round.aborted.append(mine.output.tokens)
        if self._mode.keeps:
            mine.state = NEW
        else:
            note_sample(self.round.drawn, group, mine, False, self._rules.num_responses)
            self.round.thrown += group.throw(mine)
        self._again(group)
        return self.go_on()

    def judged(self, key: Sequence[int], keep: bool) -> list[Action]:
        """See :meth:`Admitter.judged`."""
        group = self._groups.get(Key(*key))
        if group is None or not group.judging:
            return []
        keep = bool(keep)  # NumPy's and torch's are kept in no state
        group.judging, group.useful = False, keep
        self.round.judging -= 1
        self._state.verdicts = [self._state.verdicts[0] + keep, self._state.verdicts[1] + 1]
        if keep:
            self._completed.add(group, self._least(group))
        else:
            self._leave(group, self.round.filtered)
            self._state.filtered += 1
            self.round.room += not self.round.cancelled
        return self.go_on()

    def fed(self, prompts: int) -> list[Action]:
        """So many prompts came; or its epoch has ended."""
        if prompts and self.round.asked and not self._has_fresh:
            self.round.dry = True  # they are of the next epoch: of this one there are no others
        self.round.asked = max(0, self.round.asked - prompts)
        return self.go_on()

    def no_more(self) -> list[Action]:
        """See :meth:`Admitter.no_more`."""
        self.round.dry = True
        return self.go_on()

    def cancel(self) -> list[Action]:
        """See :meth:`Admitter.cancel`."""
        if not self.round.cancelled:
            self.round.cancelled = True
            self.round.room -= len(self.round.filtered)  # they come back: others were started in their place
        return self.go_on()

    def lost(self) -> list[Action]:
        """No engine has anything of it any more."""
        actions = self.cancel()
        for group in self.round.everyone:
            for sample in [sample for sample in group.samples if sample.alive]:
                actions += self.stopped(group.id_of(sample), Output())
        return actions

    def _find(self, sample: SampleId) -> tuple[Group, Sample] | None:
        """The sample, if this attempt at it is in the engine as far as we know."""
        sample = SampleId(*sample)
        group = self._groups.get(sample.key)
        if group is None or sample.number >= len(group.samples):
            return None
        found = group.samples[sample.number]
        return (group, found) if found.alive and found.attempt == sample.attempt else None

    def _check_version(self, sample: SampleId, output: Output) -> None:
        """Raises StaleOutput: tokens of other weights than the round's."""
        of = self.round.version
        if any(span.version not in (of, None) for span in output.spans):
            versions = sorted({span.version for span in output.spans if span.version is not None})
            raise StaleOutput(f"sample {list(sample)}: tokens of weights {versions} in a round of {of}")

    def _heard(self, group: Group, sample: Sample, output: Output) -> None:
        """It is out of the engine."""
        self._alive -= 1
        sample.output = sample.output.followed_by(output)
        self._deadlines.heard(group, output)

    def _again(self, group: Group) -> None:
        """One of its samples is out of the engine unfinished."""
        if not group.complete and not self.round.stopping:
            self._order.waits(group)

    def _redrawn(self, group: Group) -> list[Action]:
        """A response of a deferred prompt has ended, see ``redraws.py``."""
        responses, before = self._rules.num_responses, group.rejected
        self.round.thrown += redraws.settle(group, responses)
        self.round.redraws += group.rejected - before
        if redraws.complete(group, responses):
            self.round.gave_up += redraws.gave_up(group)
            return self._complete(group)
        self._again(group)
        return stop(group, group.draws * responses)

    def _complete(self, group: Group) -> list[Action]:
        """It has all its responses: ask for a verdict or have it returned, and stop its other samples."""
        group.complete = True
        self.round.complete[group.order] = self.round.open.pop(group.order)
        self._completed.completed(group)
        actions = _ask_verdict(self._rules, self.round, group)
        if not group.judging:
            self._completed.add(group, self._least(group))
        return actions + stop(group)

    # -- what follows ----------------------------------------------------------------------------------

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
                self.more = self._completed.has(self._may_take)
                break
            order = self._completed.pop(self._may_take)
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
        self._completed.look_again()

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
            samples = self._order.samples(group, self._alive)[: self._most - len(actions)]
            actions += [self._launch(group, sample) for sample in samples]
            if to_start(self.round, group):
                self._order.waits(group)

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
        lacks = min(self._order.places(self._alive), round_.room) - round_.asked
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
        group = self._order.next(self._has_fresh and round_.room > 0, self._alive)
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
        self._order.joined(group)
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


def end_round(state: State, round_: Round, keeps: bool, kept: list[int]) -> Summary:
    """Nothing of the round is in the engine, and all of it is taken back if it was cancelled.

    ``state.round`` is None from now on.

    Args:
        keeps: whether tokens outlive their round.
        kept: tokens of each response returned.
    """
    deferred = round_.groups
    if round_.cancelled:
        state.sort_fresh()
        state.waiting.sort(key=_by_arrival)
    else:
        _settle(state, round_, keeps, kept)
    state.thrown += round_.thrown
    state.round = None
    state.close_epochs()
    return _summary(state, round_, len(deferred), kept)


def _settle(state: State, round_: Round, keeps: bool, kept: list[int]) -> None:
    """It has happened: what it returned or filtered is gone, it has passed the others over."""
    state.rounds[round_.kind] = state.rounds.get(round_.kind, 0) + 1
    state.lengths = [state.lengths[0] + len(kept), state.lengths[1] + sum(kept)]
    state.verdicts = [count * REMEMBERED for count in state.verdicts]
    useless = [sample.output.tokens for group in round_.filtered for sample in group.kept()]
    state.bias.settle(round_.drawn, kept + useless)
    for group in round_.groups:
        _put_back(state, round_, group, keeps)
    passed_over = [replace(group, deferrals=group.deferrals + 1) for group in state.waiting]
    state.waiting = sorted(passed_over, key=_by_arrival)


def take_back(state: State, round_: Round, keeps: bool, most: int) -> bool:
    """A cancelled round has not happened: ``most`` of its groups are where they were; whether it has others."""
    for _ in range(most):
        # First those that are the smallest loss: some may have to start anew.
        if round_.filtered:
            group = round_.filtered.pop()
            state.filtered -= 1
        elif round_.open or round_.complete:
            group = (round_.open or round_.complete).popitem()[1]
        elif round_.taken:
            group = round_.taken.pop()
            state.returned -= 1
        else:
            break
        _put_back(state, round_, group, keeps)
    return bool(round_.everyone)


def _put_back(state: State, round_: Round, group: Group, keeps: bool) -> None:
    """A group waits, or is a fresh prompt again as before a cancelled round."""
    group.judging = False
    # More could not all be returned in time than there was room for.
    anew = round_.cancelled and not group.begun and not (keeps and group.tokens and round_.room >= 0)
    if not keeps and not round_.cancelled:
        group.floors = redraws.floors(group, round_.responses)
    if anew or not keeps:
        for sample in group.samples:
            if sample.state != NEW or sample.output.spans:
                round_.thrown += group.throw(sample)
            sample.had = 0
        group.chosen, group.complete, group.useful = [], False, False
        group.rejected, group.draws = 0, 1
    if anew:
        group.level = group.oldest = None
        round_.room += 1
        state.drawn -= 1
        state.fresh.append(group)
    else:
        group.begun = True
        state.waiting.append(group)


def _summary(state: State, round_: Round, deferred: int, kept: list[int]) -> Summary:
    cancelled = round_.cancelled
    undropped, error = state.bias.mean_undropped()
    return Summary(
        number=round_.number,
        kind=round_.kind,
        version=round_.version,
        target=round_.target,
        returned=0 if cancelled else len(round_.taken),
        filtered=0 if cancelled else len(round_.filtered),
        deferred=0 if cancelled else deferred,
        thrown=round_.thrown,
        cancelled=cancelled,
        drawn=state.drawn,
        kept_lengths=[] if cancelled else kept,
        aborted_lengths=round_.aborted,
        ages=[group.deferrals for group in state.waiting],
        redraws=round_.redraws,
        gave_up=round_.gave_up,
        mean_returned=state.bias.mean_returned(),
        mean_undropped=undropped,
        mean_undropped_error=error,
    )


def _by_arrival(group: Group) -> int:
    return group.order
