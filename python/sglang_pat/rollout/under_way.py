"""A round under way: what ends is noted, what is complete is returned, what may be started is started."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pat.rollout import bias, redraws
from sglang_pat.rollout.following import Following, stop
from sglang_pat.rollout.opening import ask
from sglang_pat.rollout.records import (
    DONE,
    NEW,
    STOPPING,
    Action,
    Group,
    Key,
    Output,
    Sample,
    SampleId,
)  # fmt: skip


class StaleOutput(RuntimeError):
    """Tokens of other weights than the round's: cancel it."""


class RoundUnderWay(Following):
    """The round of ``state.round``, told what happens in it; each method returns what is to be done."""

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
        bias.note(self.round.drawn, group, mine, True, self._rules.num_responses)
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
            return self._completed(group) + self.go_on()
        self._starting.changed(group)
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
            bias.note(self.round.drawn, group, mine, False, self._rules.num_responses)
            self.round.thrown += group.throw(mine)
        self._again(group)
        return self.go_on()

    def judged(self, key: Sequence[int], keep: bool, reward: float | None) -> list[Action]:
        """See :meth:`Admitter.judged`."""
        group = self._groups.get(Key(*key))
        if group is None or not group.judging:
            return []
        keep = bool(keep)  # NumPy's and torch's are kept in no state
        group.judging, group.useful, group.reward = False, keep, None if reward is None else float(reward)
        self.round.judging -= 1
        self._state.verdicts = [self._state.verdicts[0] + keep, self._state.verdicts[1] + 1]
        if keep:
            self._ready.add(group, self._least(group))
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
            self._starting.waits(group)

    def _redrawn(self, group: Group) -> list[Action]:
        """A response of a deferred prompt has ended, see ``redraws.py``."""
        responses, before = self._rules.num_responses, group.rejected
        self.round.thrown += redraws.settle(group, responses)
        self.round.redraws += group.rejected - before
        if redraws.complete(group, responses):
            self.round.gave_up += redraws.gave_up(group)
            return self._completed(group)
        self._again(group)
        return stop(group, group.draws * responses)

    def _completed(self, group: Group) -> list[Action]:
        """It has all its responses: ask for a verdict or have it returned, and stop its other samples."""
        group.complete = True
        self.round.complete[group.order] = self.round.open.pop(group.order)
        self._ready.completed(group)
        actions = ask(self._rules, self.round, group)
        if not group.judging:
            self._ready.add(group, self._least(group))
        return actions + stop(group)
