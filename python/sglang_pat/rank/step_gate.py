"""The ranks' side of ``--pat-policy schedule``: how far a rank may go on by itself (:class:`StepGate`).

All ranks of a group count the same steps, and ``StepPermit`` reaches them at the same iteration of SGLang's loop.
So they close their gates in the same iteration, without a word to each other.
"""

from __future__ import annotations

from sglang_pat.messages import HoldReport, StepPermit


class StepGate:
    """A gate before each step, open until the point that the last ``StepPermit`` set; without one it is open.

    Attributes:
        closed: whether no step may begin.
        said: whether it has been reported that the gate is closed.
    """

    def __init__(self) -> None:
        self._go = StepPermit(number=-1)
        self._steps = self._batches = 0
        self.closed = False
        self.said = False

    def set_permit(self, go: StepPermit) -> None:
        """Obey the coordinator's permit ``go``, which replaces the one before."""
        self._go, self._steps, self._batches = go, 0, 0
        self.said = False
        self.closed = go.steps == 0 or go.batches == 0

    @property
    def free(self) -> bool:
        """Whether nothing will close the gate."""
        go = self._go
        return go.steps is None and go.batches is None

    def record_step(self, decode: bool) -> None:
        """Count a step that was begun, and close the gate if it was the last one permitted."""
        if self.free:
            return
        self._batches += 1
        self._steps += decode
        if self._batches == self._go.batches or self._steps == self._go.steps:
            self.closed = True

    def close_for_switch(self, rank: int) -> HoldReport | None:
        """Close the gate when the group is left for another one.

        A gate that is not free stays closed until the coordinator's next word.  Returns what its leader has not
        reported yet.
        """
        if self.free:
            return None
        left = None if self.said else self.make_hold_report(rank)
        self.set_permit(StepPermit(number=-1, steps=0))
        return left

    def make_hold_report(self, rank: int) -> HoldReport:
        """Make the leader's report, once."""
        self.said = True
        return HoldReport(rank=rank, number=self._go.number, steps=self._steps, batches=self._batches)
