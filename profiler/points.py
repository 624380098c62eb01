"""What could be measured: the points of a grid, and how much the profile would lose without each.

A point's *level* says when it is given up if time is short.  Along every axis the two ends have level 0, the middle
between them 1, the quarters 2 and so on (the order in which bisection would visit them), and a point has the sum
over its axes: the corners come first, and each further level halves the gaps that piecewise-linear interpolation must
bridge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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


Worth = Callable[[Point], bool]


def points(grid: Grid, limits: Limits, worth: Worth = lambda point: True) -> list[Point]:
    """Every feasible point that is ``worth`` it, in the order of measurement: layout by layout decode and prefill, then
    switches between all pairs of layouts.  The first of each row (its smallest) is worth it in any case."""
    found = []
    for layout in limits.layouts:
        found += _decode(layout, layout.dp, grid.batch, [0] * len(grid.batch), grid, limits, worth)
        if layout.dp > 1:
            # A batch of one comes first: the last request of a long tail decodes alone.
            later = [2 * bool(i) for i in range(len(grid.lone))]
            found += _decode(layout, 1, grid.lone, later, grid, limits, worth)
        found += _prefill(layout, grid, limits, worth)
    for low, high in combinations(limits.layouts, 2):
        found += _switches(low, high, grid, limits, worth)
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
    layout: ParallelLayout, replicas: int, batches: tuple[int, ...], extra: list[int], grid: Grid, limits: Limits,
    worth: Worth,
) -> list[Point]:  # fmt: skip
    def at(batch: int, context: int) -> Point:
        return Point(kind="decode", tp=layout.tp, replicas=replicas, batch=batch, context=context, level=0)

    rows = {}
    for batch in batches:
        held = [at(batch, c) for c in grid.context if limits.holds(layout.tp, batch, length_needed(c))]
        rows[batch] = [point for point in held if worth(point)] or (held[:1] if batch == batches[0] else [])
    rows = {batch: row for batch, row in rows.items() if row}
    return [
        replace(point, level=level + batch_level + more)
        for row, batch_level, more in zip(rows.values(), levels(len(rows)), extra, strict=False)
        for point, level in zip(row, levels(len(row)), strict=True)
    ]


def _prefill(layout: ParallelLayout, grid: Grid, limits: Limits, worth: Worth) -> list[Point]:
    def at(batch: int, length: int) -> Point:
        return Point(kind="prefill", tp=layout.tp, replicas=layout.dp, batch=batch, context=length, level=0)

    found = []
    for batch, batch_level in zip(grid.prefill_batch, levels(len(grid.prefill_batch)), strict=True):
        held = [at(batch, n) for n in grid.prefill_length if limits.holds(layout.tp, batch, n + 2)]
        row = [point for point in held if worth(point)] or (held[:1] if batch == grid.prefill_batch[0] else [])
        # One level later than decode points: what a step takes decides more.
        found += [
            replace(point, level=1 + batch_level + level) for point, level in zip(row, levels(len(row)), strict=True)
        ]
    return found


def _switches(low: ParallelLayout, high: ParallelLayout, grid: Grid, limits: Limits, worth: Worth) -> list[Point]:
    def at(requests: int, context: int) -> Point:
        return Point(kind="switch", tp=low.tp, to_tp=high.tp, replicas=low.dp, batch=requests, context=context, level=0)

    live = [
        at(requests, context)
        for requests in grid.switch_requests
        for context in grid.switch_context
        if limits.holds(low.tp, -(-requests // low.dp), context + SWITCH_ANSWER)
    ]
    # Without any nothing would be known of what moving KV costs.
    row = [at(0, 0), *([point for point in live if worth(point)] or live[:1])]
    return [replace(point, level=level) for point, level in zip(row, levels(len(row)), strict=True)]
