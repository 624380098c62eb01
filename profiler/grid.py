"""What could be measured: the points of the grid, and how much the profile would lose without each.

A point's *level* says when it is given up if time is short.  Along every axis the two ends have level 0, the middle
between them 1, the quarters 2 and so on (the order in which bisection would visit them), and a point has the sum
over its axes: the corners come first, and each further level halves the gaps that piecewise-linear interpolation must
bridge.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from itertools import combinations, pairwise

from profiler.errors import UsageError
from sglang_pat.layout import ParallelLayout

WARM_UP = 4
"""Decode steps of a full batch that are not counted."""
STEPS = 60
"""Decode steps measured at a point if time allows, as PAT."""
LEAST_STEPS = 8
SLACK = 6
"""Decode steps by which requests of one batch may start apart."""
SWITCH_ANSWER = 256
"""Tokens that a request may decode while switches are measured with it, and so the least distance of their contexts."""
LEAST_CONTEXT, LEAST_GAP = 48, 16
"""Tokens: shortest context (a window must fit below it), and the least distance of two."""

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 65536)
"""Denser where PAT found latency least linear: at short contexts."""
LONE = (1, 2, 4)
PREFILL_BATCHES, PREFILL_LENGTHS = (1, 4, 16), (64, 256, 1024, 4096, 16384)
SWITCH_CONTEXTS = (128, 512, 2048, 8192)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one deployment can run.

    Attributes:
        layouts: lowest degree first.
        kv_tokens: KV tokens that one replica holds, by degree.
        max_running: most requests that one replica decodes at once.
        max_length: most tokens of one request, prompt and answer.
    """

    layouts: tuple[ParallelLayout, ...]
    kv_tokens: dict[int, int]
    max_running: int
    max_length: int

    def holds(self, tp: int, batch: int, length: int) -> bool:
        """Whether a replica of degree ``tp`` decodes ``batch`` requests of ``length`` tokens without retracting any."""
        return batch <= self.max_running and length <= self.max_length and batch * length <= 0.95 * self.kv_tokens[tp]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Axes, ascending; ``batch``, ``lone`` and ``prefill_batch`` count requests of one replica, ``switch_requests``
    those of the engine; the others are tokens of a request."""

    batch: tuple[int, ...]
    context: tuple[int, ...]
    lone: tuple[int, ...] = LONE
    prefill_batch: tuple[int, ...] = PREFILL_BATCHES
    prefill_length: tuple[int, ...] = PREFILL_LENGTHS
    switch_requests: tuple[int, ...] = ()
    switch_context: tuple[int, ...] = SWITCH_CONTEXTS

    def __post_init__(self) -> None:
        """Raises UsageError."""
        for name, values in asdict(self).items():
            least = LEAST_CONTEXT if name in ("context", "switch_context") else 1
            if list(values) != sorted(set(values)) or any(value < least for value in values):
                given = ",".join(map(str, values))
                raise UsageError(f"--grid {name}={given}: give ascending numbers, each at least {least}")
        for name, gap in (("context", LEAST_GAP), ("switch_context", SWITCH_ANSWER)):
            for low, high in pairwise(getattr(self, name)):
                if high - low < gap:
                    raise UsageError(f"--grid {name}={low},{high}: must be at least {gap} tokens apart")
        if not self.batch or not self.context:
            raise UsageError("--grid: batch and context need at least one number each")

    def as_lists(self) -> dict[str, list[int]]:
        """As the profile keeps it."""
        return {name: list(values) for name, values in asdict(self).items()}


def parse(text: str | None) -> dict[str, tuple[int, ...]]:
    """``"batch=1,2;context=64,128"`` → axes; the rest keeps its default.

    Raises:
        UsageError: unknown axis, or not numbers.
    """
    names = [field.name for field in fields(Grid)]
    axes: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (text or "").split(";")):
        name, _, numbers = part.partition("=")
        if name.strip() not in names:
            raise UsageError(f"--grid {part!r}: axes are {', '.join(names)}, as in batch=1,2,4;context=64,128")
        try:
            axes[name.strip()] = tuple(int(number) for number in filter(None, numbers.split(",")))
        except ValueError:
            raise UsageError(f"--grid {part!r}: give numbers separated by commas, as in batch=1,2,4") from None
    check = {"batch": (1,), "context": (LEAST_CONTEXT,)} | axes
    Grid(**check)
    return axes


def canonical(axes: dict[str, tuple[int, ...]]) -> str:
    """``axes`` as text, the same for the same request."""
    return ";".join(f"{name}={','.join(map(str, axes[name]))}" for name in sorted(axes))


def resolve(axes: dict[str, tuple[int, ...]], limits: Limits) -> Grid:
    """``axes`` completed with defaults that fit the deployment.

    Raises:
        UsageError: nothing of it fits.
    """
    ranks, base = limits.layouts[0].num_ranks, limits.layouts[0].tp
    most = min(limits.max_running, max(BATCHES))
    batch = {size for size in BATCHES if size <= most}
    requests = tuple(n for n in (ranks, 4 * ranks, 16 * ranks) if n <= limits.max_running)
    longest = min(limits.max_length, limits.kv_tokens[base])
    context = tuple(c for c in CONTEXTS if c + STEPS <= longest)
    defaults = {"batch": tuple(sorted(batch)), "context": context, "switch_requests": requests}
    grid = Grid(**defaults | axes)
    if not any(limits.holds(base, grid.batch[0], length_needed(c)) for c in grid.context):
        raise UsageError(
            f"--grid: no point fits {limits.kv_tokens[base]} KV tokens, {limits.max_running} requests a replica and "
            f"{limits.max_length} tokens a request; choose a smaller batch or context, or a larger --max-total-tokens"
        )
    return grid


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

    @property
    def chain(self) -> tuple:
        """Points of one chain share their prompts: each extends those of the one before."""
        return (self.kind, self.tp, self.replicas, self.batch)

    def __str__(self) -> str:
        if self.kind == "switch":
            return f"switch tp{self.tp} ↔ tp{self.to_tp}, {self.batch} requests of {self.context} tokens"
        lone = "" if self.kind == "prefill" else f" on {self.replicas} replica{'s' * (self.replicas > 1)}"
        return f"{self.kind} tp{self.tp}, batch {self.batch} × {self.context} tokens{lone}"


def length_needed(context: int) -> int:
    """Tokens that a request has in the end whose window lies about ``context``."""
    return context + STEPS // 2 + 2 * SLACK


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


def points(grid: Grid, limits: Limits) -> list[Point]:
    """Every feasible point, in the order of measurement: layout by layout, chains of ascending context, then
    prefill, then switches between all pairs of layouts."""
    found = []
    for layout in limits.layouts:
        found += _decode(layout, layout.dp, grid.batch, [0] * len(grid.batch), grid, limits)
        if layout.dp > 1:
            # A batch of one comes first: the last request of a long tail decodes alone.
            found += _decode(layout, 1, grid.lone, [2 * bool(i) for i in range(len(grid.lone))], grid, limits)
        # One level later than decode points: what a step takes decides more.
        for batch, batch_level in zip(grid.prefill_batch, levels(len(grid.prefill_batch)), strict=True):
            lengths = [n for n in grid.prefill_length if limits.holds(layout.tp, batch, n + 2)]
            for length, level in zip(lengths, levels(len(lengths)), strict=True):
                found.append(
                    Point(
                        kind="prefill", tp=layout.tp, replicas=layout.dp, batch=batch, context=length,
                        level=1 + batch_level + level,
                    )
                )  # fmt: skip
    for low, high in combinations(limits.layouts, 2):
        found += _switches(low, high, grid, limits)
    return found


def _decode(
    layout: ParallelLayout, replicas: int, batches: tuple[int, ...], extra: list[int], grid: Grid, limits: Limits
) -> list[Point]:
    found = []
    batches = tuple(b for b in batches if limits.holds(layout.tp, b, length_needed(grid.context[0])))
    for batch, batch_level, more in zip(batches, levels(len(batches)), extra, strict=False):
        contexts = [c for c in grid.context if limits.holds(layout.tp, batch, length_needed(c))]
        for context, level in zip(contexts, levels(len(contexts)), strict=True):
            sum_of_levels = batch_level + level + more
            found.append(
                Point(
                    kind="decode", tp=layout.tp, replicas=replicas, batch=batch, context=context, level=sum_of_levels
                )
            )  # fmt: skip
    return found


def _switches(low: ParallelLayout, high: ParallelLayout, grid: Grid, limits: Limits) -> list[Point]:
    shapes = [(0, 0)]
    for requests in grid.switch_requests:
        each = -(-requests // low.dp)
        shapes += [(requests, c) for c in grid.switch_context if limits.holds(low.tp, each, c + SWITCH_ANSWER)]
    return [
        Point(
            kind="switch", tp=low.tp, to_tp=high.tp, replicas=low.dp, batch=requests, context=context, level=level
        )
        for (requests, context), level in zip(shapes, levels(len(shapes)), strict=True)
    ]  # fmt: skip


def nearest(values: tuple[int, ...], value: int) -> int:
    """The one of ascending ``values`` next to ``value``."""
    at = bisect_right(values, value)
    return min(values[max(at - 1, 0) : at + 1], key=lambda other: abs(other - value))


def at_most(values: tuple[int, ...], value: int) -> int:
    """The largest of ascending ``values`` that is not above ``value``, or the first."""
    return values[max(bisect_right(values, value) - 1, 0)]
