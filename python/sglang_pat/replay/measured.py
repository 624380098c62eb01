"""Decisions of a log on its profile, against those on one with the step times that the run itself measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_pat.predict.correction import StepFactor
from sglang_pat.replay.log import Replayed, replay_log


@dataclass(frozen=True, kw_only=True)
class Against:
    """Of the decisions of a log.

    Attributes:
        decisions: how many; ``factors``: what the run measured, by degree.
        kept, corrected: how many differ from those on the measured times, when the profile is believed as it is, and as
            the engine decided, which corrected it.
        kept_loss, corrected_loss: the most that one of them loses, as a share of the time expected then.
    """

    decisions: int
    factors: Mapping[int, StepFactor]
    kept: int
    corrected: int
    kept_loss: float
    corrected_loss: float


def against_measured(path: Path, profile: str | None = None) -> Against:
    """The situations are the log's own: what other decisions would have led to is not simulated.

    Raises:
        ValueError: as :func:`replay_log`, or the log has no factors.
    """
    corrected = _replayed(path, profile, None)
    if not corrected.factors:
        raise ValueError(f"--log {path}: it has no step factors; give a log of survival or pat of this version")
    right, kept = _replayed(path, profile, corrected.factors), _replayed(path, profile, {})
    losses = {
        name: [
            best.estimates[mine.tp] / best.estimates[best.tp] - 1
            for mine, best in zip(found, right.found, strict=True)
            if mine.tp != best.tp and best.estimates.get(best.tp) and mine.tp in best.estimates
        ]
        for name, found in (("kept", kept.found), ("corrected", corrected.found))
    }
    return Against(
        decisions=corrected.decisions,
        factors=corrected.factors,
        kept=len(losses["kept"]),
        corrected=len(losses["corrected"]),
        kept_loss=max(losses["kept"], default=0.0),
        corrected_loss=max(losses["corrected"], default=0.0),
    )


def _replayed(path: Path, profile: str | None, factors: Mapping[int, StepFactor] | None) -> Replayed:
    *_, result = replay_log(path, profile, factors)
    return result
