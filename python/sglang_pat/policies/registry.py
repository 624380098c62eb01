"""The policies by name (``docs/policies.md`` compares them)."""

from __future__ import annotations

from collections.abc import Callable

from sglang_pat.config import POLICIES, PREDICTING
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.pat import pat
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot
from sglang_pat.policies.survival import survival
from sglang_pat.policies.threshold import threshold
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor


def stay(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """``manual`` and ``schedule``: others say when to switch."""
    return Decision(tp=snapshot.tp)


def base_only(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """``off``: never leave the base layout."""
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
        switch_at: of ``threshold``.
        predictor, costs: of this deployment, for ``pat`` and ``survival``.
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
        "threshold": lambda: threshold(switch_at, max_running),
        "schedule": lambda: stay,
        "manual": lambda: stay,
        "off": lambda: base_only,
    }
    if predictor is not None and costs is not None:
        makers["survival"] = lambda: survival(predictor, costs, max_running)
        makers["pat"] = lambda: pat(predictor, costs)
    if name not in makers:
        raise ValueError(f"policy {name!r}: choose one of {', '.join(POLICIES)}")
    return makers[name]()
