"""Rounds of requests, as they come in: in RL one is much like the one before, so its size tells when all are in."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from sglang_pat.policies.rules import SETTLE_SECONDS
from sglang_pat.policies.snapshot import Load

ROUNDS = 4
"""Rounds that are remembered: a validation set among batches of training is not forgotten at once."""

ALIKE = 2
"""So many of them must have had the largest size before it is believed: a single one may have been a warm-up, or one
turn of agents that all finished theirs together."""

WHOLE = 0.9
"""The requests of a round stand for the next one if at least this share of them was in the engine at once."""


class RoundTracker:
    """What came since the engine was last empty, and how many came in earlier rounds.

    A round ends when the engine becomes empty.  One of a single request (health probe, warm-up) does not count.

    Attributes:
        peak: most requests in the engine since it was last empty.
        last: time of the last arrival, or minus infinity.
        came: requests that came since the engine was last empty; ``switches``: switches since then.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.last = float("-inf")
        self.came = self.switches = 0
        self._sizes: deque[int] = deque(maxlen=ROUNDS)
        self._seen = self._last_round = Load()

    @property
    def expected(self) -> int:
        """Requests of a round: those of the largest of the recent ones; 0 if only one of them had so many."""
        largest = max(self._sizes, default=0)
        return largest if self._sizes.count(largest) >= ALIKE else 0

    @property
    def complete(self) -> bool:
        """Whether no more are expected: exactly as many came as in a round."""
        return 0 < self.came == self.expected

    def coming(self, now: float) -> Load:
        """The round that is about to come, or coming in: the last one of that size, as it was before its first token.

        Empty if no size is expected, all have come, or no more seem to come.
        """
        if self.peak and not self.came:
            return Load()  # what is here does not count: a health probe
        late = self.came and now - self.last >= SETTLE_SECONDS
        return Load() if late or self.came >= self.expected else self._last_round

    def saw(self, load: Load) -> None:
        """These requests were in the engine at once."""
        if len(load) >= len(self._seen):  # of the later one more is known: siblings
            self._seen = load

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
            if self.came == self.expected:
                self._last_round = _anew(self._seen) if len(self._seen) >= WHOLE * self.came else Load()
        self.peak = self.came = self.switches = 0
        self._seen = Load()


def _anew(load: Load) -> Load:
    """The same prompts, other responses: nothing is generated yet, nothing known of the families."""
    _, families = np.unique(load.family, return_inverse=True)
    return replace(load, output=np.zeros_like(load.output), family=-1 - families)
