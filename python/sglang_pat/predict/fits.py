"""Fits of the parts of a switch to measured switches: control, KV exchange, resharding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from sglang_pat.predict.profile import SwitchSample

_ROUNDS = 30
LEAST_SECONDS = 1e-9
"""Nothing that is fitted is known better than this."""


def robust_nnls(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative coefficients of ``features [samples, terms]``, little moved by a few samples far off.

    Non-negative least squares of the relative error, for a switch that takes milliseconds is to be known as well as
    one that takes a second, repeated with samples beyond the median residual weighted down by how far they are (Huber's
    weights).
    """
    each = np.maximum(np.abs(seconds), max(1e-3 * float(np.abs(seconds).max()), LEAST_SECONDS))
    features, seconds = features / each[:, None], seconds / each
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    weights = np.ones(len(seconds))
    coefficients = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients, _ = nnls(features / scale * root[:, None], seconds * root)
        residuals = np.abs(seconds - features / scale @ coefficients)
        usual = max(float(np.median(residuals)), 1e-9 * float(np.abs(seconds).max()), 1e-300)
        weights = np.minimum(1.0, usual / np.maximum(residuals, usual))
    return coefficients / scale


def fit_control(
    samples: Sequence[SwitchSample], pooled: tuple[float, float, float] | None
) -> tuple[float, float, float]:
    """(fixed, per request, per KV token that comes along): the pause without KV, weights and the wait for steps.

    What does not differ between the samples has ``pooled``'s slope.
    """
    counts = np.array([[sample.requests, _migrated(sample)] for sample in samples], dtype=float)
    seconds = np.array([max(sample.pause_seconds - _apart(sample), 0.0) for sample in samples])
    slopes = np.array(pooled[1:] if pooled else (0.0, 0.0))
    free = np.array([len(set(column)) > 1 for column in counts.T])
    rest = np.maximum(seconds - counts[:, ~free] @ slopes[~free], 0.0)
    fixed, *found = robust_nnls(np.column_stack([np.ones(len(samples)), counts[:, free]]), rest)
    slopes[free] = found
    return float(fixed), float(slopes[0]), float(slopes[1])


def _migrated(sample: SwitchSample) -> int:
    """KV tokens that moved."""
    return sample.tokens if sample.mode == "migrate" else 0


def _apart(sample: SwitchSample) -> float:
    return sum(sample.phases.get(phase, 0.0) for phase in ("drain", "kv", "weights"))


def fit_kv(samples: Sequence[SwitchSample], nested: bool = False) -> tuple[float, float] | None:
    """(fixed, per token) of the KV exchange; None without one.  ``nested``: per token that changes rank."""
    moved = [sample for sample in samples if _migrated(sample) > 0]
    if not moved:
        return None
    tokens = np.array([sample.tokens * (_moving_share(sample) if nested else 1.0) for sample in moved])
    seconds = np.array([sample.phases.get("kv", 0.0) for sample in moved])
    if len(set(tokens)) > 1:
        fixed, per_token = robust_nnls(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
        if per_token > 0:
            return float(fixed), float(per_token)
    # Too few or too noisy to tell the two apart: all of it counts as per token, which overstates long contexts.
    return 0.0, float(np.median(seconds / tokens))


def _moving_share(sample: SwitchSample) -> float:
    low, high = sorted((sample.from_tp, sample.to_tp))
    return 1 - low / high


def fit_reshard(samples: Sequence[SwitchSample]) -> float:
    """Seconds in which weights move during the pause; 0 where they are resident."""
    return float(np.median([sample.phases.get("weights", 0.0) for sample in samples]))
