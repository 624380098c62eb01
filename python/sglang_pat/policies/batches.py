"""How large the batches are that a policy brings into a layout: for these, steps are recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sglang_pat.config import AdaptiveConfig
from sglang_pat.policies.threshold import SPLIT_FACTOR
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile

SLACK = 2
"""Batches of replicas are uneven, and predictions are not exact: so many times the batch up to which a layout pays."""


def largest_batch(config: AdaptiveConfig, tp: int, profile: Profile | None = None) -> int | None:
    """Most requests that the policy has one replica of degree ``tp`` decode together.

    Args:
        profile: of this deployment; needed by policies that predict.

    Returns:
        None where the policy does not say, as others do (``manual``, ``schedule``, ``off``).
    """
    if config.policy == "threshold":
        return SPLIT_FACTOR * config.switch_at
    if not config.predicts or profile is None:
        return None
    return SLACK * _pays_up_to(profile, config, tp)


def _pays_up_to(profile: Profile, config: AdaptiveConfig, tp: int) -> int:
    """Largest batch of a replica of degree ``tp`` at which no lower degree is faster, at any context measured; at least
    1."""
    predictor = Predictor(profile)
    batches = np.arange(1, max(point.batch for point in profile.decode) + 1)
    requests = batches * config.base.with_tp(tp).dp
    best = 1
    for context in sorted({point.context for point in profile.decode}):
        seconds: dict[int, np.ndarray] = {}
        for layout in config.layouts:
            if layout.tp <= tp:
                batch = -(-requests // layout.dp)
                seconds[layout.tp] = np.asarray(predictor.step_seconds(layout.tp, batch, batch * context))
        pays = seconds[tp] <= np.minimum.reduce(list(seconds.values()))
        best = max(best, int(batches[pays].max(initial=1)))
    return best


def graph_sizes(captured: Sequence[int], largest: int | None) -> list[int]:
    """Those of SGLang's batch sizes that a layout needs: up to the first one that holds ``largest`` requests."""
    sizes = sorted(captured)
    if largest is None:
        return sizes
    return [size for before, size in pairwise([0, *sizes]) if before < largest]
