"""What could be measured: the points of a grid, and how much the profile would lose without each.

A point's *level* says when it is given up if time is short.  Along every axis the two ends have level 0, the middle
between them 1, the quarters 2 and so on (the order in which bisection would visit them), and a point has the sum
over its axes: the corners come first, and each further level halves the gaps that piecewise-linear interpolation must
bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from profiler.grid import SWITCH_ANSWER, Grid, Limits, length_needed
from sglang_pat.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Point:
    """Something to measure.

    Attributes:
        kind: ``decode``, ``prefill`` or ``switch``.
        tp: degree; for a switch the lower one, ``to_tp`` the higher.
        replicas: replicas at work; for a switch those of the lower degree.
        batch: requests of each replica; for a switch those of the engine.
        context: tokens of each request in the middle of the window, or its prompt's length.
        level: see the module.
    """

    kind: str
    tp: int
    replicas: int
    batch: int
    context: int
    level: int
    to_tp: int = 0

    @property
    def key(self) -> tuple:
        return (self.kind, self.tp, self.to_tp, self.replicas, self.batch, self.context)

    def __str__(self) -> str:
        if self.kind == "switch":
            return f"switch tp{self.tp} ↔ tp{self.to_tp}, {self.batch} requests of {self.context} tokens"
        lone = "" if self.kind == "prefill" else f" on {self.replicas} replica{'s' * (self.replicas > 1)}"
        return f"{self.kind} tp{self.tp}, batch {self.batch} × {self.context} tokens{lone}"


def points(grid: Grid, limits: Limits, most_prefill: Mapping[int, int] | None = None) -> list[Point]:
    """Every feasible point in the order of measurement: layout by layout decode and prefill, then switches between all
    pairs of layouts.

    ``most_prefill``: tokens of the largest prefill by degree; None: whatever the replica holds.
    """
    found = []
    for layout in limits.layouts:
        found += _decode(layout, layout.dp, grid.batch, [0] * len(grid.batch), grid, limits)
        if layout.dp > 1:
            # A batch of one comes first: the last request of a long tail decodes alone.
            found += _decode(layout, 1, grid.lone, [2 * bool(i) for i in range(len(grid.lone))], grid, limits)
        most = limits.kv_tokens[layout.tp] if most_prefill is None else most_prefill[layout.tp]
        found += _prefill(layout, grid, limits, most)
    for low, high in combinations(limits.layouts, 2):
        found += _switches(low, high, grid, limits)
    return found


def levels(count: int) -> list[int]:
    """Bisection level of each of ``count`` places."""
    level = [0] * count
    spans = [(0, count - 1, 1)]
    while spans:
        low, high, depth = spans.pop()
        if high - low > 1:
            middle = (low + high) // 2
            level[middle] = depth
            spans += [(low, middle, depth + 1), (middle, high, depth + 1)]
    return level


def _decode(
    layout: ParallelLayout, replicas: int, batches: tuple[int, ...], extra: list[int], grid: Grid, limits: Limits
) -> list[Point]:
    def feasible(batch: int, context: int) -> bool:
        return limits.holds(layout.tp, batch, length_needed(context))

    found = []
    batches = tuple(b for b in batches if feasible(b, grid.context[0]))
    for batch, batch_level, more in zip(batches, levels(len(batches)), extra, strict=False):
        contexts = [c for c in grid.context if feasible(batch, c)]
        for context, level in zip(contexts, levels(len(contexts)), strict=True):
            level += batch_level + more
            found.append(
                Point(kind="decode", tp=layout.tp, replicas=replicas, batch=batch, context=context, level=level)
            )
    return found


def _prefill(layout: ParallelLayout, grid: Grid, limits: Limits, most: int) -> list[Point]:
    found = []
    for batch, batch_level in zip(grid.prefill_batch, levels(len(grid.prefill_batch)), strict=True):
        lengths = [n for n in grid.prefill_length if limits.holds(layout.tp, batch, n + 2) and batch * n <= most]
        for length, level in zip(lengths, levels(len(lengths)), strict=True):
            # One level later than decode points: what a step takes decides more.
            level += 1 + batch_level
            found.append(
                Point(kind="prefill", tp=layout.tp, replicas=layout.dp, batch=batch, context=length, level=level)
            )
    return found


def _switches(low: ParallelLayout, high: ParallelLayout, grid: Grid, limits: Limits) -> list[Point]:
    shapes = [(0, 0)]
    for requests in grid.switch_requests:
        each = -(-requests // low.dp)
        shapes += [(requests, c) for c in grid.switch_context if limits.holds(low.tp, each, c + SWITCH_ANSWER)]
    return [
        Point(kind="switch", tp=low.tp, to_tp=high.tp, replicas=low.dp, batch=requests, context=context, level=level)
        for (requests, context), level in zip(shapes, levels(len(shapes)), strict=True)
    ]
