"""How many drafts of a step are right (:class:`Acceptance`), and how many a step should check."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_pat.predict.predictor import StepPredictor

KEYS = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
"""Keys of ``meta_info``, by SGLang's names: number of steps that checked drafts, of drafts, and of right drafts."""

KEPT = 0.98
"""Share of what was counted that a step with drafts leaves of it: some fifty steps count."""
BEGIN = 0.5
"""Probability of a draft before any was checked; counts as one draft."""
GAIN = 1.1
"""Least gain of a step with drafts, by the profile: it does not know the host's work for drafts."""
PROBE_STEPS = 64
"""Plain steps after which one step checks a draft all the same, so that it is known when drafts have become better."""


class Acceptance:
    """Probability that a draft is right if those before it are, by its place, over the last steps."""

    def __init__(self, most: int) -> None:
        self._checked, self._right = [1.0] * most, [BEGIN] * most
        self._plain = 0

    def record(self, asked: int, right: Sequence[int]) -> None:
        """Note a step in which each request was to have ``asked`` drafts, and how many of them were ``right``.

        A draft that was not found, or not allowed, was not right.
        """
        self._plain = 0
        for place in range(asked):
            self._checked[place] = KEPT * self._checked[place] + sum(count >= place for count in right)
            self._right[place] = KEPT * self._right[place] + sum(count > place for count in right)

    def record_plain(self) -> None:
        """Note a step for which no drafts were asked."""
        self._plain += 1

    @property
    def must_probe(self) -> bool:
        return self._plain >= PROBE_STEPS

    def compute_tokens(self, most: int) -> list[float]:
        """Tokens that a request is expected to get in a step with 0, 1, … ``most`` drafts."""
        tokens, reached = [1.0], 1.0
        for checked, right in zip(self._checked[:most], self._right[:most], strict=True):
            reached *= right / checked
            tokens.append(tokens[-1] + reached)
        return tokens


def choose_count(
    predictor: StepPredictor, acceptance: Acceptance, tp: int, requests: int, tokens: int, most: int
) -> int:
    """Number of drafts of each request with which a step gives the most tokens a second; 0 if a plain step does.

    A step with drafts is, to the profile, a decode step of as many more requests of the same lengths.

    Args:
        tp: degree of the replica.
        requests, tokens: what a plain step decodes, and how many tokens it attends to.
        most: most drafts.
    """
    rows = np.arange(1, most + 2)
    seconds = np.asarray(predictor.step_seconds(tp, requests * rows, tokens * rows)).tolist()
    gains = [each * seconds[0] / taken for each, taken in zip(acceptance.compute_tokens(most), seconds, strict=True)]
    best = max(range(most + 1), key=gains.__getitem__)
    return best if gains[best] >= GAIN else int(acceptance.must_probe)
