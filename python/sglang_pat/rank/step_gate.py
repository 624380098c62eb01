"""How far a rank may go on by itself: the ranks' side of ``--pat-policy schedule``.

All ranks of a group count the same steps, and ``StepPermit`` reaches them at the same iteration of SGLang's loop.
So they close their gates in the same iteration, without a word to each other.
"""

from __future__ import annotations

from sglang_pat.messages import HoldReport, StepPermit


class StepGate:
    """Open until the point that the last ``StepPermit`` set; from the start without one.

    Attributes:
        closed: no step may begin.
        said: that it is closed has been reported.
    """

    def __init__(self) -> None:
        self._go = StepPermit(number=-1)
        self._steps = self._batches = 0
        self.closed = False
        self.said = False

    def set_permit(self, go: StepPermit) -> None:
        """The coordinator's word; replaces the one before."""
        self._go, self._steps, self._batches = go, 0, 0
        self.said = False
        self.closed = go.steps == 0 or go.batches == 0

    @property
    def free(self) -> bool:
        """Whether nothing will close it."""
        go = self._go
        return go.steps is None and go.batches is None

    def record_step(self, decode: bool) -> None:
        """A step was begun."""
        if self.free:
            return
        self._batches += 1
        self._steps += decode
        if self._batches == self._go.batches or self._steps == self._go.steps:
            self.closed = True

    def close_for_switch(self, rank: int) -> HoldReport | None:
        """The group is left for another one.

        A gate that is not free stays closed until the coordinator's next word.  Returns what its leader has not
        reported yet.
        """
        if self.free:
            return None
        left = None if self.said else self.make_hold_report(rank)
        self.set_permit(StepPermit(number=-1, steps=0))
        return left

    def make_hold_report(self, rank: int) -> HoldReport:
        """What the leader reports, once."""
        self.said = True
        return HoldReport(rank=rank, number=self._go.number, steps=self._steps, batches=self._batches)
