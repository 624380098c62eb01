"""What there is time for: the cost of the points to come, from those measured, and which of them to leave out.

Once, when first costs are known: which points are not worth it (:func:`worth`).  Then before each point, in this order,
until the rest fits:

1. measure fewer steps where a step is slow: at most :data:`ALLOWANCES` seconds of steps a point, 8 steps at least;
2. leave out points, highest level first (:mod:`profiler.points`), the dearest first within a level.

What a profile cannot do without (``must``: a decode point of every layout, a switch with live requests of every pair)
is measured in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from math import ceil
from statistics import median

import numpy as np
from scipy.optimize import nnls

from profiler.grid import LEAST_STEPS, STEPS, WARM_UP
from profiler.points import Point

ALLOWANCES = (float("inf"), 8.0, 4.0, 2.0)
"""Seconds of decode steps a point, tried in this order; below the last one points are left out."""
POINT_SECONDS = 0.1
"""Overhead of a point before anything is known."""
SWITCH_ROUNDS = 3
"""There and back, so many times with the same requests."""
RESERVE = 0.93
"""Part of the time left that is planned for; the rest is for attempts that fail."""
DEAREST, SHARES = 0.04, 3
"""One point may take this part of the time left, or so many times its share of it, if the grid is small: beyond, the
predictor goes on with the last slope."""
PREFILLS = 3
QUICK_SECONDS = 1.0
"""A prefill is repeated, :data:`PREFILLS` times at most, until its runs took so long together."""


@dataclass
class Costs:
    """Learns what points cost from what was measured.

    Attributes:
        decode: (tp, requests of a replica, their tokens) and the step's seconds.
        prefill: (tp, new tokens of a replica, times context) and their seconds.
        begin: (tp, context tokens of a replica, times context) and the seconds until a batch decodes whose prompts
            are in the radix cache.  Some attention backends pay for the whole prompt there (torch_native).
        ratios: by kind of point, seconds that it took in fact over those expected.
    """

    decode: list[tuple[int, float, float, float]] = field(default_factory=list)
    prefill: list[tuple[int, float, float, float]] = field(default_factory=list)
    begin: list[tuple[int, float, float, float]] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    _fits: dict = field(default_factory=dict)

    def saw_decode(self, tp: int, batch: int, tokens: float, seconds: float) -> None:
        self.decode.append((tp, batch, tokens, seconds))
        self._fits.clear()

    def saw_prefill(self, tp: int, new_tokens: float, context: float, seconds: float) -> None:
        self.prefill.append((tp, new_tokens, new_tokens * context, seconds))
        self._fits.clear()

    def saw_begin(self, tp: int, tokens: float, context: float, seconds: float) -> None:
        self.begin.append((tp, tokens, tokens * context, seconds))
        self._fits.clear()

    def saw_point(self, kind: str, expected: float, seconds: float) -> None:
        if expected > 0:
            self.ratios.setdefault(kind, []).append(min(max(seconds / expected, 0.2), 5.0))

    def step_seconds(self, tp: int, batch: int, tokens: float) -> float:
        """A decode step: constant + per request + per token, none negative."""
        return self._estimate("decode", self.decode, tp, batch, tokens)

    def prefill_seconds(self, tp: int, new_tokens: float, context: float) -> float:
        return self._estimate("prefill", self.prefill, tp, new_tokens, new_tokens * context)

    def begin_seconds(self, tp: int, tokens: float, context: float) -> float:
        return self._estimate("begin", self.begin, tp, tokens, tokens * context)

    def correction(self, kind: str) -> float:
        ratios = self.ratios.get(kind, [])
        return median(ratios[-10:]) if len(ratios) >= 3 else 1.0

    def _estimate(self, name: str, seen: list[tuple[int, float, float, float]], tp: int, x: float, y: float) -> float:
        if not seen:
            return 0.0
        key = (name, tp)
        if key not in self._fits:
            rows = np.array([row for row in seen if row[0] == tp] or seen, dtype=float)
            inputs = np.column_stack([np.ones(len(rows)), rows[:, 1], rows[:, 2]])
            scale = np.maximum(inputs.max(axis=0), 1e-9)
            # Relative errors count: each row is divided by its own time.
            weight = 1 / np.maximum(rows[:, 3], 1e-6)
            found, _ = nnls(inputs / scale * weight[:, None], rows[:, 3] * weight)
            self._fits[key] = found / scale
        return float(self._fits[key] @ [1.0, x, y])


@dataclass(frozen=True)
class SweepPlan:
    """What to do.

    Attributes:
        points: to measure, in order; ``left_out``: the others.
        steps: decode steps of each point, by key.
        seconds: expected, in all.
        allowance: one of :data:`ALLOWANCES`.
    """

    points: tuple[Point, ...]
    left_out: tuple[Point, ...]
    steps: dict[tuple, int]
    seconds: float
    allowance: float


def steps_for(costs: Costs, point: Point, allowance: float) -> int:
    """Decode steps to measure at ``point`` in ``allowance`` seconds."""
    each = costs.step_seconds(point.tp, point.batch, point.batch * point.context)
    return STEPS if each <= 0 else int(min(STEPS, max(LEAST_STEPS, allowance / each)))


def seconds_of(costs: Costs, point: Point, allowance: float) -> float:
    """Expected seconds of ``point``."""
    if point.kind == "prefill":
        each = costs.prefill_seconds(point.tp, point.batch * point.context, point.context)
        runs = min(max(ceil(QUICK_SECONDS / max(each, 1e-9)), 1), PREFILLS)
        return POINT_SECONDS + (runs + 0.5) * each
    batch = -(-point.batch // point.replicas) if point.kind == "switch" else point.batch
    begin = costs.begin_seconds(point.tp, batch * point.context, point.context)
    step = costs.step_seconds(point.tp, batch, batch * point.context)
    steps = 16 if point.kind == "switch" else WARM_UP + 2 + steps_for(costs, point, allowance)
    return POINT_SECONDS + begin + steps * step


def worth(costs: Costs, point: Point, seconds: float, count: int) -> bool:
    """Whether ``point`` costs little enough, if ``seconds`` are left for all ``count`` points."""
    return seconds_of(costs, point, ALLOWANCES[-1]) <= max(DEAREST, SHARES / count) * seconds


def total(costs: Costs, points: Iterable[Point], allowance: float) -> float:
    """Expected seconds of ``points``."""
    return sum(seconds_of(costs, point, allowance) * costs.correction(point.kind) for point in points)


def plan(points: list[Point], costs: Costs, seconds: float, must: Set[tuple] = frozenset()) -> SweepPlan:
    """Which of ``points`` (in their order) to measure in the ``seconds`` left, and how.

    ``must``: keys of those without which there is no profile.
    """
    seconds *= RESERVE
    for allowance in ALLOWANCES:
        if total(costs, points, allowance) <= seconds:
            return _made(points, [], costs, allowance)
    price = {point.key: seconds_of(costs, point, allowance) for point in points}
    order = sorted(points, key=lambda p: (p.key not in must, p.level, price[p.key]))
    low, high = sum(point.key in must for point in points), len(order)
    while low < high:
        middle = (low + high + 1) // 2
        kept = {point.key for point in order[:middle]}
        if total(costs, [p for p in points if p.key in kept], allowance) <= seconds:
            low = middle
        else:
            high = middle - 1
    kept = {point.key for point in order[:low]}
    left_out = [p for p in points if p.key not in kept]
    return _made([p for p in points if p.key in kept], left_out, costs, allowance)


def coverage(points: list[Point], costs: Costs, first: float, left: float, must: Set[tuple]) -> SweepPlan:
    """The plan before points are visited again.

    Args:
        first: seconds left of the part of the time in which points are measured first.
        left: seconds left in all.  They go to the corners of the grid that did not fit into ``first``: to know a step
            of the largest batch is worth more than to know one of a small batch twice.
    """
    now = plan(points, costs, first, must)
    return now if now.points else plan([point for point in points if point.level == 0], costs, left)


def _made(kept: list[Point], left_out: list[Point], costs: Costs, allowance: float) -> SweepPlan:
    steps = {p.key: steps_for(costs, p, allowance) for p in kept if p.kind == "decode"}
    return SweepPlan(tuple(kept), tuple(left_out), steps, total(costs, kept, allowance), allowance)


def parse_budget(text: str) -> float:
    """``90s``, ``10m``, ``1.5h`` or seconds → seconds.

    Raises:
        ValueError: none of these, or not more than 0.
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    unit = units.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"--budget {text!r}: give a time such as 90s, 10m or 1.5h")
    return value
