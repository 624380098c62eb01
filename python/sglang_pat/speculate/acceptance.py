"""How many drafts of a step are right (:class:`Acceptance`), and how many each request should have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

KEYS = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
"""Keys of ``meta_info``, by SGLang's names: number of steps that checked drafts, of drafts, and of right drafts."""

OF_MODEL = 13
"""Match of the drafts of a trained model; those of texts go up to 12."""
MATCHES = (1, 2, 3, 5, 8, 12, OF_MODEL)
"""Least match (:meth:`.drafter.Drafter.find_match`) of each class.  Drafts of a class are right about equally often."""
KEPT = 0.99
"""Share of what was counted that a step leaves of it: some hundred steps count."""
BEGIN = np.array([[0.2], [0.3], [0.4], [0.5], [0.5], [0.5], [0.6]])
"""Probability of a draft of each class before any was checked, as measured of a small model (docs/results/
speculation.md), and of a trained drafter as published for EAGLE-3; counts as one draft.  So drafts that were wrong are
tried again as what was counted fades."""
MOST_ROWS = 128
"""Most rows of a step with drafts: requests, and drafts of all of them."""
GAIN = 1.1
"""Least gain of a step with drafts, by the profile: it does not know the host's work for drafts."""


class Acceptance:
    """Probability that a draft is right if those before it are, by match and place, over the last steps."""

    def __init__(self, most: int) -> None:
        self._checked, self._right = np.zeros((2, len(MATCHES), most))

    def pass_step(self) -> None:
        """Note that there is a decode step, with drafts or without."""
        self._checked *= KEPT
        self._right *= KEPT

    def record(self, match: int, drafts: int, right: int) -> None:
        """Note that of so many ``drafts`` after a ``match`` the first ``right`` were right.

        A draft that was not found was not right.
        """
        if match and drafts:
            number = _classify(match)
            self._checked[number, : min(right + 1, drafts)] += 1
            self._right[number, :right] += 1

    def estimate(self, match: int) -> list[float]:
        """Probability of each draft after a ``match`` that it and all before it are right; none without a match."""
        if not match:
            return []
        number = _classify(match)
        right = (self._right[number] + BEGIN[number]) / (self._checked[number] + 1)
        return list(accumulate(right.tolist(), lambda before, this: before * this))


def _classify(match: int) -> int:
    return bisect_right(MATCHES, match) - 1


def choose_counts(chances: Sequence[Sequence[float]], seconds: np.ndarray) -> list[int]:
    """Number of drafts of each request with which a step gives the most tokens a second; 0 if a plain step does.

    Args:
        chances: for each request, :meth:`Acceptance.estimate` as far as it may have drafts.
        seconds: of a step with 0, 1, … drafts of all requests together.
    """
    ordered = sorted((-chance, number) for number, of_one in enumerate(chances) for chance in of_one)
    ordered = ordered[: len(seconds) - 1]
    tokens = list(accumulate((-chance for chance, _ in ordered), initial=float(len(chances))))
    gains = np.array(tokens) / seconds[: len(tokens)]
    best = int(gains.argmax())
    counts = [0] * len(chances)
    if gains[best] >= GAIN * gains[0]:
        for _, number in ordered[:best]:
            counts[number] += 1
    return counts
