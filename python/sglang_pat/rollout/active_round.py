"""A round from :func:`open_round` to :func:`end_round`: :class:`ActiveRound` is told of each event and returns
actions.

Beside the round's record (:class:`~.state.Round`) it keeps what follows from that (:class:`CompletedGroups`,
``LaunchOrder``), so that no event has to go through all groups.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from sglang_pat.rollout import redraws
from sglang_pat.rollout.deadlines import Deadlines
from sglang_pat.rollout.estimates import note_sample
from sglang_pat.rollout.launch_order import NextPrompt, Strict, list_unstarted
from sglang_pat.rollout.records import (
    DONE,
    NEW,
    RUNNING,
    STOPPING,
    Abort,
    Action,
    Group,
    Judge,
    Launch,
    NeedPrompts,
    Output,
    PromptKey,
    ReturnGroup,
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


class CompletedGroups:
    """Complete groups that may be returned, found without going through those that may not: by how many more rounds
    they may wait, each class in the order of completion."""

    def __init__(self) -> None:
        self._completed: dict[int, int] = {}
        self._classes: dict[int, list[tuple[int, int]]] = {}

    def add_last(self, group: Group) -> None:
        """Note that the group is the last to have been completed."""
        self._completed[group.order] = len(self._completed)

    def add(self, group: Group, least: int) -> None:
        """Let a group be returned; ``least``: how many more rounds it may wait."""
        heapq.heappush(self._classes.setdefault(least, []), (self._completed[group.order], group.order))

    def pop(self, may_take: Callable[[int], bool]) -> int | None:
        """The order of the first completed of those whose class may be taken now; None if there is none."""
        heaps = [(heap[0], heap) for least, heap in self._classes.items() if heap and may_take(least)]
        return heapq.heappop(min(heaps)[1])[1] if heaps else None


def open_round(rules: Rules, state: State, mode: Strict, deadlines: Deadlines, version: int) -> list[Action]:
    """A round with the weights ``version`` is ``state.round`` from now on; returns what is to be done at once.

    Raises:
        ValueError: there are no prompts, or too few of an epoch that has not ended; nothing changes.
    """
    epoch, fresh = _may_begin(rules, state, version)
    deadlines.check(state.waiting)
    jump = 1 if state.version is None else max(1, version - state.version)
    state.waiting, thrown = deadlines.drop_stale_tokens(state.waiting, version, jump)
    slacks = [deadlines.compute_slack(group, version, jump) for group in state.waiting]
    owed = deadlines.count_due_groups(slacks)
    plan = mode.plan(state, owed, fresh)
    flushes = epoch in state.ended and mode.should_flush(len(state.waiting), fresh)
    target = min(rules.num_prompts, len(state.waiting) + fresh)
    urgent = sorted(zip(slacks, state.waiting, strict=True), key=lambda pair: (pair[0], pair[1].order))
    round_ = state.round = Round(
        number=state.last + 1, epoch=epoch, kind=FLUSH if flushes else plan.kind, version=version,
        target=target, prompts=plan.prompts, responses=plan.responses, owed=[min(count, target) for count in owed],
        jump=jump, thrown=thrown, forced=[group.key for _, group in urgent[: max(owed)]],
        room=deadlines.compute_longest_wait(jump) * rules.num_prompts + target - len(state.waiting),
    )  # fmt: skip
    state.version = version
    return _take_over(rules, state, round_) if rules.keeps else []


def _may_begin(rules: Rules, state: State, version: int) -> tuple[int, int]:
    """The epoch, and the number of its prompts that were never started; raises as :func:`open_round`."""
    epoch = state.epoch
    if epoch is None:
        raise ValueError("there are no prompts: feed some")
    if state.version is not None and version < state.version:
        raise ValueError(f"version is {version}, the last round's was {state.version}: it cannot be smaller")
    fresh = state.count_fresh(epoch)
    total = len(state.waiting) + fresh
    if total < rules.num_prompts and epoch not in state.ended:
        raise ValueError(f"{total} prompts for a round of {rules.num_prompts}: feed more, or end epoch {epoch}")
    return epoch, fresh


def _take_over(rules: Rules, state: State, round_: Round) -> list[Action]:
    """Make what is complete or half done part of the round from the start, not copied but to be judged."""
    waiting, state.waiting = state.waiting, []
    actions: list[Action] = []
    for group in waiting:
        if group.complete and rules.filter_groups and not group.useful:
            group = group.copy_for_changes()
            actions += _ask_verdict(rules, round_, group)
        (round_.complete if group.complete else round_.open)[group.order] = group
    return actions


def _ask_verdict(rules: Rules, round_: Round, group: Group) -> list[Action]:
    """The action that asks for the verdict on a complete group, where one is wanted and was not given."""
    group.judging = rules.filter_groups and not group.useful
    round_.judging += group.judging
    return [Judge(group)] if group.judging else []


class ActiveRound:
    """The round of ``state.round``, told what happens in it; each method returns what is to be done.

    Args:
        deadlines: the deadlines, which the round keeps up to date.

    Attributes:
        round: record of the round, part of the state.
        kept: lengths of the responses returned.
    """

    def __init__(self, rules: Rules, state: State, mode: Strict, deadlines: Deadlines) -> None:
        assert state.round is not None, "it was opened"
        round_ = self.round = state.round
        self._rules, self._state, self._deadlines = rules, state, deadlines
        self.kept: list[int] = []
        self._alive = 0
        """Number of samples that the engine has."""
        self._groups = {group.key: group for group in round_.groups}
        self._borrowed = {group.order for group in round_.groups}
        """Groups that copies of earlier states have as well: they may not be changed before they are
        :meth:`_get_own_copy`."""
        self._order = mode.order(rules, round_, state)
        self._completed = CompletedGroups()
        for group in round_.complete.values():
            self._completed.add_last(group)
            if not group.judging:
                self._completed.add(group, self._get_least_slack(group))

    # -- what happens ----------------------------------------------------------------------------------

    def record_finished(self, sample: SampleId, output: Output) -> list[Action]:
        """See :meth:`Admitter.record_finished`."""
        place = self._find(sample)
        if place is None:
            return []
        group, response = place
        late = response.state == STOPPING and not self._rules.keeps
        self._record_output(group, response, output)
        note_sample(self.round.drawn, group, response, True, self._rules.num_responses)
        if late:
            self.round.thrown += group.drop_tokens(response)
            self._requeue(group)
            return self.get_more_actions()
        response.state = DONE
        self._state.cost.add_response(response.output)
        group.chosen.append(response.number)
        if self._rules.unbiased and group.floors:
            return self._redraw(group) + self.get_more_actions()
        completed = self._complete(group) if len(group.chosen) == self._rules.num_responses else []
        return completed + self.get_more_actions()

    def record_stopped(self, sample: SampleId, output: Output) -> list[Action]:
        """See :meth:`Admitter.record_stopped`."""
        place = self._find(sample)
        if place is None:
            return []
        group, response = place
        self._record_output(group, response, output)
        self.round.aborted.append(response.output.tokens)
        if self._rules.keeps:
            response.state = NEW
        else:
            note_sample(self.round.drawn, group, response, False, self._rules.num_responses)
            self.round.thrown += group.drop_tokens(response)
        self._requeue(group)
        return self.get_more_actions()

    def record_verdicts(self, verdicts: Iterable[tuple[Sequence[int], bool]]) -> list[Action]:
        """See :meth:`Admitter.record_verdicts`."""
        for key, keep in verdicts:
            group = self._groups.get(PromptKey(*key))
            if group is not None and group.judging:
                self._record_verdict(group, bool(keep))  # NumPy's and torch's are kept in no state
        return self.get_more_actions()

    def _record_verdict(self, group: Group, keep: bool) -> None:
        group.judging, group.useful = False, keep
        self.round.judging -= 1
        self._state.verdicts = [self._state.verdicts[0] + keep, self._state.verdicts[1] + 1]
        if keep:
            self._completed.add(group, self._get_least_slack(group))
        else:
            self._remove_group(group, self.round.filtered)
            self._state.filtered += 1
            self.round.room += 1

    def record_reward(self, sample: SampleId, reward: float) -> None:
        """See :meth:`Admitter.record_reward`."""
        group = self._groups.get(sample.key)
        if group is None or not (group.order in self.round.open or group.order in self.round.complete):
            return  # returned: whoever has it has its rewards
        response = self._get_own_copy(group).samples[sample.number]
        if response.state == DONE and response.attempt == sample.attempt:
            response.reward = reward

    def list_chosen(self, key: PromptKey) -> list[int] | None:
        """See :meth:`Admitter.list_chosen`."""
        group = self._groups.get(key)
        return None if group is None else group.chosen

    def add_prompts(self, prompts: int) -> list[Action]:
        """Record that ``prompts`` prompts came, or that their epoch has ended."""
        if prompts and self.round.asked and not self._has_fresh:
            self.round.dry = True  # they are of the next epoch: of this one there are no others
        self.round.asked = max(0, self.round.asked - prompts)
        return self.get_more_actions()

    def end_prompts(self) -> list[Action]:
        """See :meth:`Admitter.end_prompts`."""
        self.round.dry = True
        return self.get_more_actions()

    def cancel(self) -> list[Action]:
        """See :meth:`Admitter.cancel`."""
        self.round.cancelled = True
        return self.get_more_actions()

    def _find(self, sample: SampleId) -> tuple[Group, Sample] | None:
        """The sample, if this attempt at it is in the engine as far as we know."""
        sample = SampleId(*sample)
        group = self._groups.get(sample.key)
        if group is None or sample.number >= len(group.samples):
            return None
        response = group.samples[sample.number]
        return (group, response) if response.alive and response.attempt == sample.attempt else None

    def _record_output(self, group: Group, sample: Sample, output: Output) -> None:
        """Record what a sample generated that is out of the engine."""
        self._alive -= 1
        self.round.made += output.tokens
        sample.output = sample.output.concatenate(output)
        self._deadlines.record_output(group, output)

    def _requeue(self, group: Group) -> None:
        """Queue the group again one of whose samples is out of the engine unfinished."""
        if not group.complete and not self.round.stopping:
            self._order.add_waiting(group)

    def _redraw(self, group: Group) -> list[Action]:
        """A response of a deferred prompt has ended, see ``redraws.py``."""
        responses, before = self._rules.num_responses, group.rejected
        self.round.thrown += redraws.reject_and_redraw(group, responses)
        self.round.redraws += group.rejected - before
        if redraws.complete(group, responses):
            self.round.gave_up += redraws.has_given_up(group)
            return self._complete(group)
        self._requeue(group)
        return stop(group, group.draws * responses)

    def _complete(self, group: Group) -> list[Action]:
        """Move a group that has all its responses: ask for a verdict or have it returned, and stop its other
        samples."""
        group.complete = True
        self.round.complete[group.order] = self.round.open.pop(group.order)
        self._completed.add_last(group)
        actions = _ask_verdict(self._rules, self.round, group)
        if not group.judging:
            self._completed.add(group, self._get_least_slack(group))
        return actions + stop(group)

    # -- what follows ----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether nothing of the round is in the engine, and nobody is waited for: a full batch needs no more
        verdicts."""
        round_ = self.round
        awaits = round_.judging or (round_.asked and not self._dry)
        return not self._alive and (round_.stopping or not awaits)

    @property
    def _dry(self) -> bool:
        """Whether no other prompts come for this round."""
        return self.round.dry or self.round.epoch in self._state.ended

    def get_more_actions(self) -> list[Action]:
        """Return what is complete, start what may be started, or stop what runs."""
        round_ = self.round
        if round_.stopping:
            return []
        actions: list[Action] = []
        if not round_.cancelled:
            actions += self._return_completed()
            if len(round_.taken) < round_.target:
                return actions + self._start() + self._ask_for_prompts()
        round_.stopping = True
        return actions + [abort for group in round_.groups for abort in stop(group)]

    def _return_completed(self) -> list[Action]:
        """Return groups in the order in which they were completed, as far as older ones do not need the place."""
        round_ = self.round
        actions: list[Action] = []
        while len(round_.taken) < round_.target:
            order = self._completed.pop(self._may_take)
            if order is None:
                break
            group = self._get_own_copy(round_.complete[order])
            self._remove_group(group, round_.taken)
            self._state.returned += 1
            self.kept += [sample.output.tokens for sample in group.list_kept()]
            actions.append(ReturnGroup(group))
        return actions

    def _may_take(self, least: int) -> bool:
        """Whether enough places remain for the groups that must be in this round if such a one is returned."""
        round_ = self.round
        places = round_.target - len(round_.taken) - 1
        return all(count - (j >= least) <= places for j, count in enumerate(round_.owed))

    def _remove_group(self, group: Group, where: list[Group]) -> None:
        """Take a group out of the round that is returned or filtered."""
        round_ = self.round
        least = self._get_least_slack(group)
        round_.owed = [max(0, count - (j >= least)) for j, count in enumerate(round_.owed)]
        del round_.complete[group.order]
        where.append(group)

    def _get_least_slack(self, group: Group) -> int:
        """Number of rounds that a group may still wait."""
        return self._deadlines.compute_slack(group, self.round.version, self.round.jump)

    def _start(self) -> list[Action]:
        """Start as many samples as may be."""
        actions: list[Action] = []
        while (group := self._pick_next_group()) is not None:
            actions += [self._launch(group, sample) for sample in self._order.choose_samples(group, self._alive)]
            if list_unstarted(self.round, group):
                self._order.add_waiting(group)
        return actions

    def _ask_for_prompts(self) -> list[Action]:
        """Ask for prompts, where some could be started that are not there: so many were useless."""
        round_ = self.round
        if not self._rules.filter_groups or self._dry or self._has_fresh:
            return []
        lacks = min(self._order.count_free_places(self._alive), round_.room) - round_.asked
        if lacks <= 0:
            return []
        # Not for each one alone; what the round does not start is there for the next one.
        count = max(lacks, -(-self._rules.num_prompts // ASK_SHARE))
        round_.asked += count
        return [NeedPrompts(count)]

    @property
    def _has_fresh(self) -> bool:
        fresh = self._state.fresh
        return bool(fresh) and fresh[0].epoch == self.round.epoch

    def _pick_next_group(self) -> Group | None:
        """The group of which samples are started now; it is part of the round from now on."""
        round_, state = self.round, self._state
        group = self._order.pick_next(self._has_fresh and round_.room > 0, self._alive)
        if isinstance(group, NextPrompt):
            round_.room -= 1
            state.drawn += 1
            return self._join(state.fresh.pop(0))
        if group is not None and group.order not in round_.open:
            # In the order of arrival: found without looking at all of them.
            del state.waiting[bisect_left(state.waiting, group.order, key=lambda other: other.order)]
            return self._join(group)
        return group if group is None else self._get_own_copy(group)

    def _get_own_copy(self, group: Group) -> Group:
        """A group of the round that may be changed."""
        if group.order not in self._borrowed:
            return group
        self._borrowed.remove(group.order)
        group = group.copy_for_changes()
        (self.round.complete if group.complete else self.round.open)[group.order] = group
        self._groups[group.key] = group
        return group

    def _join(self, group: Group) -> Group:
        """The group as part of the round."""
        group = group.copy_for_changes()
        self.round.open[group.order] = group
        self._groups[group.key] = group
        group.fill(self.round.responses)
        return group

    def _launch(self, group: Group, sample: Sample) -> Launch:
        sample.state = RUNNING
        sample.attempt += 1
        self._alive += 1
        return Launch(group.get_sample_id(sample), group.prompt, sample.output if sample.output.tokens else None)


def stop(group: Group, first: int = 0) -> list[Action]:
    """Abort what runs of a group, from sample ``first`` on."""
    running = [sample for sample in group.samples[first:] if sample.state == RUNNING]
    for sample in running:
        sample.state = STOPPING
    return [Abort(group.get_sample_id(sample)) for sample in running]


def end_round(rules: Rules, state: State, round_: Round, kept: list[int]) -> Summary:
    """The engine has nothing of the round; ``state.round`` is None from now on.

    Args:
        state: if the round was cancelled, the one before it.
        kept: tokens of each response returned.
    """
    cancelled = round_.cancelled
    if cancelled:
        round_.thrown = round_.made
    else:
        _complete_round(rules, state, round_, kept)
    state.thrown += round_.thrown
    state.round = None
    state.close_epochs()
    undropped, error = state.bias.estimate_mean_undropped()
    return Summary(
        number=round_.number,
        kind=round_.kind,
        version=round_.version,
        target=round_.target,
        returned=0 if cancelled else len(round_.taken),
        filtered=0 if cancelled else len(round_.filtered),
        deferred=0 if cancelled else len(round_.groups),
        thrown=round_.thrown,
        cancelled=cancelled,
        drawn=state.drawn,
        kept_lengths=[] if cancelled else kept,
        aborted_lengths=round_.aborted,
        ages=[group.deferrals for group in state.waiting],
        redraws=round_.redraws,
        gave_up=round_.gave_up,
        mean_returned=state.bias.compute_mean_returned(),
        mean_undropped=undropped,
        mean_undropped_error=error,
    )


def _complete_round(rules: Rules, state: State, round_: Round, kept: list[int]) -> None:
    """Record a round that has happened: what it returned or filtered is gone, it has passed the others over."""
    state.rounds[round_.kind] = state.rounds.get(round_.kind, 0) + 1
    state.lengths = [state.lengths[0] + len(kept), state.lengths[1] + sum(kept)]
    state.verdicts = [count * REMEMBERED for count in state.verdicts]
    useless = [sample.output.tokens for group in round_.filtered for sample in group.list_kept()]
    state.bias.add_round(round_.drawn, kept + useless)
    for group in round_.groups:
        group.judging, group.begun = False, True
        if not rules.keeps:
            _restart(round_, group)
        state.waiting.append(group)
    passed_over = [replace(group, deferrals=group.deferrals + 1) for group in state.waiting]
    state.waiting = sorted(passed_over, key=lambda group: group.order)


def _restart(round_: Round, group: Group) -> None:
    """Throw away what a group has: tokens do not outlive their round."""
    group.floors = redraws.list_length_floors(group, round_.responses)
    for sample in group.samples:
        if sample.state != NEW or sample.output.spans:
            round_.thrown += group.drop_tokens(sample)
        sample.had = 0
    group.chosen, group.complete, group.useful = [], False, False
    group.rejected, group.draws = 0, 1
