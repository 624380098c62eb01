"""The policies by name (:func:`make_policy`; ``docs/policies.md`` compares them), and the batches that each brings into
a layout (:func:`get_largest_batch`): for these, steps are recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from sglang_pat.config import DECIDING, POLICIES, PREDICTING, AdaptiveConfig
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.pat import make_pat_policy
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot
from sglang_pat.policies.start import hold_start_degree
from sglang_pat.policies.survival import make_survival_policy
from sglang_pat.policies.threshold import SPLIT_FACTOR, make_threshold_policy
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import Predictor, StepPredictor
from sglang_pat.predict.profile import Profile

SLACK = 2
"""Batches of replicas are uneven, and predictions are not exact: so many times the batch up to which a layout pays."""


def keep_layout(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """The policy of ``manual`` and ``schedule``: others say when to switch."""
    return Decision(tp=snapshot.tp)


def use_base_layout(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """The policy of ``off``: never leave the base layout."""
    return Decision(tp=snapshot.degrees[0])


def make_policy(
    name: str,
    *,
    switch_at: int = 8,
    predictor: StepPredictor | None = None,
    costs: SwitchCosts | None = None,
    max_running: int | None = None,
) -> Policy:
    """The policy called ``name``.

    Args:
        switch_at: requests left at which ``threshold`` merges.
        predictor, costs: step times and switch costs of this deployment, for ``pat`` and ``survival``.
        max_running: most requests that one replica decodes at once (``--max-running-requests``), for ``survival``.

    Raises:
        ValueError: no such policy, or it needs a profile and there is none.
    """
    if name in PREDICTING and (predictor is None or costs is None):
        raise ValueError(
            f"policy {name} needs a profile: give --pat-profile FILE (python -m profiler.sweep makes one) "
            "or choose threshold"
        )
    makers: dict[str, Callable[[], Policy]] = {
        "threshold": lambda: make_threshold_policy(switch_at, max_running),
        "schedule": lambda: keep_layout,
        "manual": lambda: keep_layout,
        "off": lambda: use_base_layout,
    }
    if predictor is not None and costs is not None:
        makers["survival"] = lambda: make_survival_policy(predictor, costs, max_running)
        makers["pat"] = lambda: make_pat_policy(predictor, costs)
    if name not in makers:
        raise ValueError(f"policy {name!r}: choose one of {', '.join(POLICIES)}")
    return hold_start_degree(makers[name]()) if name in DECIDING else makers[name]()


def get_largest_batch(config: AdaptiveConfig, tp: int, profile: Profile | None = None) -> int | None:
    """Most requests that the policy has one replica of degree ``tp`` decode together.

    Args:
        profile: profile of this deployment; needed by policies that predict.

    Returns:
        None where the policy does not say, as others do (``manual``, ``schedule``, ``off``).
    """
    if config.policy == "threshold":
        return SPLIT_FACTOR * config.switch_at
    if not config.predicts or profile is None:
        return None
    return SLACK * _find_largest_useful_batch(profile, config, tp)


def _find_largest_useful_batch(profile: Profile, config: AdaptiveConfig, tp: int) -> int:
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


def select_graph_sizes(captured: Sequence[int], largest: int | None) -> list[int]:
    """SGLang's batch sizes that a layout needs: up to the first one that holds ``largest`` requests."""
    sizes = sorted(captured)
    if largest is None:
        return sizes
    return [size for before, size in pairwise([0, *sizes]) if before < largest]
