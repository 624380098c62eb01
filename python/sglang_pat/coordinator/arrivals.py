"""Rounds of requests, as they come in: in RL one is much like the one before, so its size tells when all are in."""

from __future__ import annotations

from collections import deque

ROUNDS = 4
"""Rounds that are remembered: a validation set among batches of training is not forgotten at once."""

ALIKE = 2
"""So many of them must have had the largest size before it is believed: a single one may have been a warm-up, or one
turn of agents that all finished theirs together."""


class Arrivals:
    """What came since the engine was last empty, and how many came in earlier rounds.

    A round ends when the engine becomes empty.  One of a single request (health probe, warm-up) does not count.

    Attributes:
        peak: most requests in the engine since it was last empty.
        last: time of the last arrival, or minus infinity.
        came: requests that came since the engine was last empty.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.last = float("-inf")
        self.came = 0
        self._sizes: deque[int] = deque(maxlen=ROUNDS)

    @property
    def complete(self) -> bool:
        """Whether no more are expected: as many came as in the largest of the recent rounds, and no more than that."""
        if not self._sizes:
            return False
        largest = max(self._sizes)
        return self.came == largest and self._sizes.count(largest) >= ALIKE

    def arrived(self, now: float) -> None:
        """A request goes into the engine."""
        self.last = now
        self.came += 1

    def in_engine(self, requests: int) -> None:
        """So many are in it now: called after each event, or the end of a round may be missed."""
        if requests:
            self.peak = max(self.peak, requests)
            return
        if self.came > 1:
            self._sizes.append(self.came)
        self.peak = self.came = 0
