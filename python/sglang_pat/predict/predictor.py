"""How long a decode step and a prefill take in a layout, from a profile (PAT section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

import numpy as np

from sglang_pat.predict.profile import DecodePoint, PrefillPoint, Profile, ProfileError
from sglang_pat.predict.surface import Surface

Number = float | int | np.ndarray


class _Degree:
    """The surfaces of one degree, one for each number of replicas that was measured."""

    def __init__(self, points: list[tuple[int, float, float, float]]) -> None:
        """``points``: (replicas, batch, x, seconds)."""
        counts = sorted({replicas for replicas, *_ in points})
        self.counts = np.array(counts, dtype=float)
        self.surfaces = [Surface((b, x, s) for replicas, b, x, s in points if replicas == count) for count in counts]

    def at(self, replicas: Number, batch: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Interpolated between the measured numbers of replicas; outside them the nearest one holds."""
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

    What happens between and beyond measured points is said in :class:`~sglang_pat.predict.surface.Surface`.  All
    calls broadcast over arrays and loop over nothing longer than the measured numbers of replicas.

    Raises:
        ProfileError: the profile has no decode times, or a call names a degree it does not have.
    """

    def __init__(self, profile: Profile) -> None:
        self.num_ranks = profile.fingerprint.num_ranks
        self._decode = _by_degree((point, point.batch * point.context) for point in profile.decode)
        # At equal length, prefill work is linear in the batch; at equal aggregate tokens it would not be.
        self._prefill = _by_degree((point, point.length) for point in profile.prefill)
        if not self._decode:
            raise ProfileError("the profile has no decode times; make one with python -m profiler.sweep")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees with measured decode times, ascending."""
        return tuple(sorted(self._decode))

    @overload
    def step_seconds(self, tp: int, batch: float, tokens: float, replicas: float | None = None) -> float: ...

    @overload
    def step_seconds(self, tp: int, batch: Number, tokens: Number, replicas: Number | None = None) -> Number: ...

    def step_seconds(self, tp: int, batch: Number, tokens: Number, replicas: Number | None = None) -> Number:
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

    @overload
    def covers(self, tp: int, batch: float, tokens: float) -> bool: ...

    @overload
    def covers(self, tp: int, batch: Number, tokens: Number) -> bool | np.ndarray: ...

    def covers(self, tp: int, batch: Number, tokens: Number) -> bool | np.ndarray:
        """Whether the query lies inside the profiled grid of degree ``tp`` (widest measured number of replicas)."""
        inside = _of(self._decode, "decode", tp).surfaces[-1].inside(np.asarray(batch), np.asarray(tokens))
        return bool(inside) if np.ndim(inside) == 0 else inside

    def has_prefill(self, tp: int) -> bool:
        return tp in self._prefill

    def prefill_seconds(self, tp: int, lengths: np.ndarray, replicas: float | None = None) -> float:
        """Seconds to prefill requests of ``lengths`` tokens, ``[requests]``, on one replica.

        Uneven lengths count as the same number of requests of their root-mean-square length, which keeps the
        quadratic part of the work (PAT eq. 3 and 4) and overstates the linear one.
        """
        lengths = np.asarray(lengths, dtype=float)
        if lengths.size == 0:
            return 0.0
        return self.prefill_uniform(tp, lengths.size, float(np.sqrt(np.mean(lengths**2))), replicas)

    @overload
    def prefill_uniform(self, tp: int, batch: float, length: float, replicas: float | None = None) -> float: ...

    @overload
    def prefill_uniform(self, tp: int, batch: Number, length: Number, replicas: Number | None = None) -> Number: ...

    def prefill_uniform(self, tp: int, batch: Number, length: Number, replicas: Number | None = None) -> Number:
        """Seconds to prefill ``batch`` requests of ``length`` tokens each on one replica; broadcasts."""
        return self._evaluate(self._prefill, "prefill", tp, batch, length, replicas)

    def _evaluate(
        self, table: dict[int, _Degree], what: str, tp: int, batch: Number, x: Number, replicas: Number | None
    ) -> Number:
        degree = _of(table, what, tp)
        replicas = self.num_ranks // tp if replicas is None else replicas
        seconds = degree.at(replicas, np.asarray(batch, dtype=float), np.asarray(x, dtype=float))
        return float(seconds) if np.ndim(seconds) == 0 else seconds


def _by_degree(points: Iterable[tuple[DecodePoint | PrefillPoint, float]]) -> dict[int, _Degree]:
    """``points``: with the x of each."""
    grouped: dict[int, list[tuple[int, float, float, float]]] = {}
    for point, x in points:
        grouped.setdefault(point.tp, []).append((point.replicas, point.batch, x, point.seconds))
    return {tp: _Degree(rows) for tp, rows in grouped.items()}


def _of(table: dict[int, _Degree], what: str, tp: int) -> _Degree:
    try:
        return table[tp]
    except KeyError:
        raise ProfileError(
            f"the profile has no {what} times for tp={tp}, only for {sorted(table)}; sweep again with this degree"
        ) from None
