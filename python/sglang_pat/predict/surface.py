"""Measured seconds as a surface over batch and tokens: piecewise-linear curves, one for each profiled batch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

HAIR = 1e-14
"""Some tens of times the rounding of a float."""


class Surface:
    """PAT's latency model (section 4.2, Fig. 6), evaluated without a loop over queries.

    For each profiled batch, a piecewise-linear curve over ``x`` (aggregate context tokens for decode, tokens of a
    request for prefill).  A query is interpolated linearly between the curves of the two nearest batches *at the
    same x*.  Measured points are reproduced exactly, and where they rise in ``x`` so does the surface.

    A query outside what was measured is continued, never clamped without a word (:meth:`inside` tells):

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
        curves = _curves(points)
        self.batches = np.array(sorted(curves), dtype=float)
        ordered = [curves[batch] for batch in sorted(curves)]
        self._first = np.array([x[0] for x, _ in ordered])
        self._last = np.array([x[-1] for x, _ in ordered])
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

    def inside(self, batch: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Whether queries lie between the profiled batches and, there, between the shortest and the longest context.

        The limits in ``x`` are interpolated between the neighbouring batches' first and last knots.
        """
        first, last = np.interp(batch, self.batches, self._first), np.interp(batch, self.batches, self._last)
        return (self.batches[0] <= batch) & (batch <= self.batches[-1]) & (first <= x) & (x <= last)


Curve = tuple[np.ndarray, np.ndarray]


def _curves(points: Iterable[tuple[float, float, float]]) -> dict[float, Curve]:
    """Batch → (knots ascending, seconds at them)."""
    found: dict[float, dict[float, list[float]]] = {}
    for batch, x, seconds in points:
        found.setdefault(float(batch), {}).setdefault(float(x), []).append(seconds)
    return {
        batch: (np.array(sorted(knots)), np.array([np.mean(knots[x]) for x in sorted(knots)]))
        for batch, knots in found.items()
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
