"""Times of decode steps that check as many drafts as pay (:class:`DraftingPredictor`), by which policies choose the
layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from sglang_pat.predict.predictor import StepPredictor, Value
from sglang_pat.speculate.acceptance import GAIN, MOST_ROWS

COUNTS = (1, 2, 4, 8)
"""Numbers of drafts that are compared; the engine chooses one for each request."""


class DraftingPredictor:
    """Seconds of a step over the tokens that a request gets from it.

    Args:
        predictor: of plain steps.
        chances: probability of the first, second, … draft of a request that it and those before it are right.
        draft_seconds: seconds of a trained model for one draft of each request (:class:`~.snapshot.Snapshot`).
        max_running: most rows of a replica's step; None if only :data:`~.acceptance.MOST_ROWS` bounds them.
    """

    def __init__(
        self,
        predictor: StepPredictor,
        chances: Sequence[float],
        draft_seconds: float = 0.0,
        max_running: int | None = None,
    ) -> None:
        self._predictor, self._most_rows = predictor, min(MOST_ROWS, max_running or MOST_ROWS)
        self._draft_seconds = draft_seconds
        tokens = list(accumulate(chances, initial=1.0))
        self._tokens = {count: tokens[count] for count in COUNTS if count <= len(chances)}

    def has_prefill(self, tp: int) -> bool:
        return self._predictor.has_prefill(tp)

    def step_seconds(self, tp: int, batch: Value, tokens: Value, replicas: Value | None = None) -> Value:
        """Seconds for each token of a request, with the number of drafts that makes them least; see
        :meth:`.predictor.Predictor.step_seconds`."""
        least = self._find_least(tp, np.asarray(batch, dtype=float), np.asarray(tokens, dtype=float), replicas)
        seconds: Any = least if least.ndim else float(least)
        return seconds

    def _find_least(self, tp: int, batch: np.ndarray, tokens: np.ndarray, replicas: Any) -> np.ndarray:
        plain = least = np.asarray(self._predictor.step_seconds(tp, batch, tokens, replicas))
        for count, gained in self._tokens.items():
            rows = batch * (count + 1)
            checking = self._predictor.step_seconds(tp, rows, tokens * (count + 1), replicas)
            seconds = (checking + count * self._draft_seconds) / gained
            pays = (rows <= self._most_rows) & (seconds * GAIN <= plain)
            least = np.where(pays, np.minimum(least, seconds), least)
        return least

    def prefill_uniform(self, tp: int, batch: Value, length: Value, replicas: Value | None = None) -> Value:
        return self._predictor.prefill_uniform(tp, batch, length, replicas)
