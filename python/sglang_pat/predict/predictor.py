"""How long a decode step and a prefill take in a layout, from a profile (PAT section 4.2).

:class:`Surface` is one set of piecewise-linear curves.  :class:`Predictor` has one for each degree and number of
replicas that was measured.  :class:`StepPredictor` is what a policy asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from scipy.optimize import isotonic_regression

from sglang_pat.predict.profile import DecodePoint, PrefillPoint, Profile, ProfileError

Number = float | int | np.ndarray

Value = TypeVar("Value", float, Number)
"""Scalars give a float; if any argument is an array, so is the answer."""

MONOTONE_ROUNDS = 50
"""Most alternating projections; what is left after them is less than a percent."""

HAIR = 1e-14
"""Some tens of times the rounding of a float."""


class Surface:
    """PAT's latency model (section 4.2, Fig. 6), evaluated without a loop over queries.

    For each profiled batch, a piecewise-linear curve over ``x`` (aggregate context tokens for decode, tokens of a
    request for prefill).  A query is interpolated linearly between the curves of the two nearest batches *at the
    same x*.  Measured points are reproduced exactly, and where they rise in ``x`` so does the surface.

    A query outside what was measured is continued, never clamped:

    * ``x`` beyond a curve's last knot: the last segment goes on, its slope floored at 0.
    * ``x`` below the first knot: the first segment goes on, its slope kept between 0 and a hair less than that of the
      line through the origin, so that no time is negative, not even by rounding.
    * A curve of one knot takes both slopes from the nearest batch that has two; with no such batch it is flat.
    * Batches above the largest: the line through the last two batches at this ``x`` goes on, never below the
      largest batch's value.
    * Batches below the smallest: the line through the first two goes on, never above the smallest batch's value and
      never below its time *per request*.  A single profiled batch holds for all batches.
    * A batch of 0 takes 0 seconds: there is no step.
    """

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        """``points``: (batch, x, seconds), in any order; repeated ones are averaged."""
        curves = _make_curves(points)
        self.batches = np.array(sorted(curves), dtype=float)
        ordered = [curves[batch] for batch in sorted(curves)]
        # On the union of all knots every curve is still piecewise linear: one search serves them all.
        self._knots = np.unique(np.concatenate([x for x, _ in ordered]))
        anchors = np.concatenate([self._knots[:1], self._knots])
        values: list[np.ndarray] = []
        slopes: list[np.ndarray] = []
        for index, (x, y) in enumerate(ordered):
            below, above = _end_slopes(index, ordered, self.batches)
            value = np.interp(self._knots, x, y)
            value += below * np.minimum(self._knots - x[0], 0) + above * np.maximum(self._knots - x[-1], 0)
            values.append(np.concatenate([value[:1], value]))
            slopes.append(np.concatenate([[below], np.diff(value) / np.diff(self._knots), [above]]))
        self._anchors, self._cells = anchors, len(anchors)
        self._values, self._slopes = np.concatenate(values), np.concatenate(slopes)

    def __call__(self, batch: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Seconds for float arrays that broadcast against each other."""
        cell = np.searchsorted(self._knots, x, side="right")
        beyond = x - self._anchors.take(cell)
        if len(self.batches) == 1:
            flat = self._values.take(cell) + self._slopes.take(cell) * beyond
            return np.where(batch > 0, flat, 0.0)
        row = np.minimum(np.searchsorted(self.batches[1:-1], batch, side="right"), len(self.batches) - 2)
        at = row * self._cells + cell
        low = self._values.take(at) + self._slopes.take(at) * beyond
        at = at + self._cells
        high = self._values.take(at) + self._slopes.take(at) * beyond
        left = self.batches.take(row)
        share = (batch - left) / (self.batches.take(row + 1) - left)
        seconds = (1 - share) * low + share * high
        smallest, largest = self.batches[0], self.batches[-1]
        seconds = np.where(batch > largest, np.maximum(seconds, high), seconds)
        fewest = np.clip(batch / smallest, 0, 1)
        return np.where(batch < smallest, np.clip(seconds, low * fewest, low * (fewest > 0)), seconds)


Curve = tuple[np.ndarray, np.ndarray]


def _make_curves(points: Iterable[tuple[float, float, float]]) -> dict[float, Curve]:
    """Batch → (knots ascending, seconds at them)."""
    curves: dict[float, dict[float, list[float]]] = {}
    for batch, x, seconds in points:
        curves.setdefault(float(batch), {}).setdefault(float(x), []).append(seconds)
    return {
        batch: (np.array(sorted(knots)), np.array([np.mean(knots[x]) for x in sorted(knots)]))
        for batch, knots in curves.items()
    }


def _end_slopes(index: int, curves: list[Curve], batches: np.ndarray) -> tuple[float, float]:
    """Slopes with which curve ``index`` goes on below its first and above its last knot, seconds a unit of x."""
    x, y = curves[index]
    distance = np.abs(batches - batches[index])
    nearest = (curves[int(other)] for other in np.argsort(distance, kind="stable"))
    donors = [curve for curve in nearest if len(curve[0]) > 1]
    if not donors:
        return 0.0, 0.0
    near_x, near_y = donors[0]  # itself, if it has two knots
    slopes = np.diff(near_y) / np.diff(near_x)
    through_origin = (1 - HAIR) * y[0] / x[0] if x[0] > 0 else np.inf
    return float(np.clip(slopes[0], 0.0, through_origin)), float(max(slopes[-1], 0.0))


class StepPredictor(Protocol):
    """Seconds of one replica; :class:`Predictor` says what the arguments are."""

    def step_seconds(self, tp: int, batch: Value, tokens: Value, replicas: Value | None = None) -> Value: ...

    def has_prefill(self, tp: int) -> bool: ...

    def prefill_uniform(self, tp: int, batch: Value, length: Value, replicas: Value | None = None) -> Value: ...


class _Degree:
    """The surfaces of one degree, one for each number of replicas that was measured."""

    def __init__(self, points: list[tuple[int, float, float, float]]) -> None:
        """``points``: (replicas, batch, x, seconds)."""
        counts = sorted({replicas for replicas, *_ in points})
        self.counts = np.array(counts, dtype=float)
        self.surfaces = [Surface((b, x, s) for replicas, b, x, s in points if replicas == count) for count in counts]

    def evaluate(self, replicas: Number, batch: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Seconds interpolated between the measured numbers of replicas; outside them the nearest one holds."""
        if len(self.surfaces) == 1:
            return self.surfaces[0](batch, x)
        position = np.interp(replicas, self.counts, np.arange(len(self.counts)))
        if position.ndim == 0:
            low = int(position)
            share = position - low
            seconds = self.surfaces[low](batch, x)
            return seconds if share == 0 else (1 - share) * seconds + share * self.surfaces[low + 1](batch, x)
        seconds = np.zeros(())
        for index in range(int(position.min()), int(np.ceil(position.max())) + 1):
            weight = np.maximum(1 - np.abs(position - index), 0)
            seconds = seconds + weight * self.surfaces[index](batch, x)
        return seconds


class Predictor:
    """Step and prefill times of one replica, as functions of its load.

    More requests, or longer ones, never take less time: where that was measured it is noise (:func:`_make_monotone`).
    What happens between and beyond measured points is said in :class:`Surface`.  All calls broadcast over arrays and
    loop over nothing longer than the measured numbers of replicas.

    Raises:
        ProfileError: the profile has no decode times, or a call names a degree it does not have.
    """

    def __init__(self, profile: Profile) -> None:
        self.num_ranks = profile.fingerprint.num_ranks
        self._decode = _make_degree_surfaces(profile.decode)
        self._prefill = _make_degree_surfaces(profile.prefill)
        if not self._decode:
            raise ProfileError("the profile has no decode times; make one with python -m profiler.sweep")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees with measured decode times, ascending."""
        return tuple(sorted(self._decode))

    def step_seconds(self, tp: int, batch: Value, tokens: Value, replicas: Value | None = None) -> Value:
        """Seconds of a decode step of ONE replica.

        Args:
            tp: degree.
            batch: requests of this replica.
            tokens: context tokens of these requests together.
            replicas: replicas of this layout that decode at the same time; None for all N / tp.

        Returns:
            float for scalars, else float64 of the broadcast shape.
        """
        return self._evaluate(self._decode, "decode", tp, batch, tokens, replicas)

    def has_prefill(self, tp: int) -> bool:
        return tp in self._prefill

    def prefill_uniform(self, tp: int, batch: Value, length: Value, replicas: Value | None = None) -> Value:
        """Seconds to prefill ``batch`` requests of ``length`` tokens each on one replica; broadcasts.

        Uneven lengths count by their root mean square, which keeps the quadratic part of the work (PAT eq. 3 and 4) and
        overstates the linear one.
        """
        return self._evaluate(self._prefill, "prefill", tp, batch, length, replicas)

    def _evaluate(
        self, table: dict[int, _Degree], what: str, tp: int, batch: Number, x: Number, replicas: Number | None
    ) -> Any:
        if tp not in table:
            raise ProfileError(
                f"the profile has no {what} times for tp={tp}, only for {sorted(table)}; sweep again with this degree"
            )
        replicas = self.num_ranks // tp if replicas is None else replicas
        seconds = table[tp].evaluate(replicas, np.asarray(batch, dtype=float), np.asarray(x, dtype=float))
        return float(seconds) if np.ndim(seconds) == 0 else seconds


def _make_degree_surfaces(points: Sequence[DecodePoint] | Sequence[PrefillPoint]) -> dict[int, _Degree]:
    grouped: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for point in points:
        length = point.context if isinstance(point, DecodePoint) else point.length
        grouped.setdefault((point.tp, point.replicas), []).append((point.batch, length, point.seconds))
    # At equal length, prefill work is linear in the batch; at equal aggregate tokens it would not be.
    aggregate = bool(points) and isinstance(points[0], DecodePoint)
    rows: dict[int, list[tuple[int, float, float, float]]] = {}
    for (tp, replicas), measured in grouped.items():
        for (batch, length, _), seconds in zip(measured, _make_monotone(measured), strict=True):
            rows.setdefault(tp, []).append((replicas, batch, batch * length if aggregate else length, seconds))
    return {tp: _Degree(each) for tp, each in rows.items()}


def _make_monotone(points: Sequence[tuple[int, int, float]]) -> list[float]:
    """Seconds of ``(batch, length, seconds)`` so that more requests, or longer ones, never take less time.

    What is measured less is noise: the nearest such times, by least squares of their logarithms (isotonic regression,
    by Dykstra's alternating projections on the two orders).  Times that rise already stay as they are.
    """
    batches, lengths, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    lines = [
        [np.flatnonzero(key == value)[np.argsort(other[key == value], kind="stable")] for value in np.unique(key)]
        for key, other in ((batches, lengths), (lengths, batches))
    ]
    logs, off = np.log(seconds), [np.zeros(len(seconds)) for _ in lines]
    for _ in range(MONOTONE_ROUNDS):
        before = logs
        for order, each in enumerate(lines):
            target = logs + off[order]
            logs = target.copy()
            for line in each:
                logs[line] = isotonic_regression(target[line]).x
            off[order] = target - logs
        if np.abs(logs - before).max() < 1e-6:
            break
    for line in (line for each in lines for line in each):  # what the rounds have left of it
        logs[line] = np.maximum.accumulate(logs[line])
    return np.where(np.abs(np.log(seconds) - logs) < 1e-9, seconds, np.exp(logs)).tolist()
