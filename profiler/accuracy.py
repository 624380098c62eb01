"""How well a profile predicts itself: each decode point from all the others (leave one out)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

import msgspec

from profiler.windows import spread
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import DecodePoint, Profile


@dataclass(frozen=True, kw_only=True)
class Check:
    """One decode point, left out and predicted.

    Attributes:
        measured, predicted: seconds of a step.
        inside: other points of this batch lie on both sides, so that it was interpolated; else it was continued.
    """

    tp: int
    replicas: int
    batch: int
    context: int
    measured: float
    predicted: float
    inside: bool

    @property
    def error(self) -> float:
        """Absolute, relative to what was measured."""
        return abs(self.predicted - self.measured) / self.measured


def leave_one_out(profile: Profile) -> list[Check]:
    """A check for each point of a layout (and number of replicas) that has others."""
    checks = []
    for point in profile.decode:
        others = tuple(other for other in profile.decode if other is not point)
        peers = [o for o in others if (o.tp, o.replicas) == (point.tp, point.replicas)]
        if not peers:
            continue
        same = [o.context for o in peers if o.batch == point.batch]
        predictor = Predictor(msgspec.structs.replace(profile, decode=tuple(peers), prefill=()))
        checks.append(
            Check(
                tp=point.tp,
                replicas=point.replicas,
                batch=point.batch,
                context=point.context,
                measured=point.seconds,
                predicted=predictor.step_seconds(point.tp, point.batch, point.batch * point.context, point.replicas),
                inside=bool(same) and min(same) < point.context < max(same),
            )
        )
    return checks


def summary(profile: Profile, checks: list[Check]) -> list[dict[str, float | int | str]]:
    """By layout: points, mean absolute error where interpolated and where continued, and the windows' own spread."""
    rows = []
    for tp in sorted({check.tp for check in checks}):
        mine = [check for check in checks if check.tp == tp]
        inside = [check.error for check in mine if check.inside]
        ends = [check.error for check in mine if not check.inside]
        rows.append(
            {
                "layout": f"tp{tp}×dp{profile.fingerprint.num_ranks // tp}",
                "points": len(mine),
                "interpolated": mean(inside) if inside else float("nan"),
                "continued": mean(ends) if ends else float("nan"),
                "spread": _spread([point for point in profile.decode if point.tp == tp]),
            }
        )
    return rows


def _spread(points: list[DecodePoint]) -> float:
    """Median over points of (largest - smallest window) / median window; nan without samples."""
    found = [spread(point.samples) for point in points if len(point.samples) > 1]
    return median(found) if found else float("nan")
