"""The points that are measured (:func:`list_points`), and their order: from ``--grid`` (:func:`resolve`) and from what
the deployment holds (:class:`Limits`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations, pairwise

from sglang_pat.layout import ParallelLayout
from sglang_pat.predict.profile import MOST_POINTS
from sglang_pat.tools.commands import UsageError

WARM_UP = 4
"""Decode steps of a full batch that are not counted."""
STEPS, LEAST_STEPS = 32, 4
"""Decode steps measured at a point, and their least number where a step is slow."""
SLACK = 6
"""Decode steps by which requests of one batch may start apart."""
SWITCH_ANSWER = 256
"""Tokens that a request may decode while switches are measured with it, and so the least distance of their contexts."""
SWITCH_ROUNDS = 3
"""Number of times that switches go there and back with the same requests."""
LEAST_CONTEXT, LEAST_GAP = 48, 16
"""Tokens: shortest context (the steps must fit below it), and the least distance of two."""

BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 512, 2048, 8192, 32768)
"""Default axes, coarse: a finer grid decides no better (docs/results/profiler.md)."""
LONE = (1, 4)
PREFILL_BATCHES, PREFILL_LENGTHS = (1, 4), (64, 1024, 8192)
SWITCH_CONTEXTS = (128, 2048)


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

    def can_hold(self, tp: int, batch: int, length: int) -> bool:
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
        """Raise UsageError unless the axes are usable."""
        for name, values in asdict(self).items():
            least = LEAST_CONTEXT if name in ("context", "switch_context") else 1
            if list(values) != sorted(set(values)) or any(value < least for value in values):
                text = ",".join(map(str, values))
                raise UsageError(f"--grid {name}={text}: give ascending numbers, each at least {least}")
        for name, gap in (("context", LEAST_GAP), ("switch_context", SWITCH_ANSWER)):
            for low, high in pairwise(getattr(self, name)):
                if high - low < gap:
                    raise UsageError(f"--grid {name}={low},{high}: must be at least {gap} tokens apart")
        if not self.batch or not self.context:
            raise UsageError("--grid: batch and context need at least one number each")

    def as_lists(self) -> dict[str, list[int]]:
        """Axes as the profile keeps them."""
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
    Grid(**{"batch": (1,), "context": (LEAST_CONTEXT,)} | axes)
    return axes


def format_axes(axes: dict[str, tuple[int, ...]]) -> str:
    """``axes`` as text, the same for the same request."""
    return ";".join(f"{name}={','.join(map(str, axes[name]))}" for name in sorted(axes))


def compute_length_needed(context: int) -> int:
    """Tokens that a request has in the end whose steps lie about ``context``."""
    return context + STEPS // 2 + 2 * SLACK


def resolve(axes: dict[str, tuple[int, ...]], limits: Limits) -> Grid:
    """``axes`` completed with defaults that fit the deployment; its largest batch is always one of them.

    Raises:
        UsageError: nothing of it fits.
    """
    ranks, base = limits.layouts[0].num_ranks, limits.layouts[0].tp
    most = min(limits.max_running, max(BATCHES))
    longest = min(limits.max_length, limits.kv_tokens[base])
    defaults = {
        "batch": (*(size for size in BATCHES if size < most), most),
        "context": tuple(c for c in CONTEXTS if c + STEPS <= longest),
        "switch_requests": tuple(n for n in (ranks, 8 * ranks) if n <= limits.max_running),
    }
    grid = Grid(**defaults | axes)
    if not any(limits.can_hold(base, grid.batch[0], compute_length_needed(c)) for c in grid.context):
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
        context: tokens of each request in the middle of the steps, or its prompt's length.
    """

    kind: str
    tp: int
    replicas: int
    batch: int
    context: int
    to_tp: int = 0

    @property
    def row(self) -> tuple:
        """What a point has in common with those that differ in batch and context."""
        return (self.kind, self.tp, self.to_tp, self.replicas)

    def __str__(self) -> str:
        if self.kind == "switch":
            return f"switch tp{self.tp} ↔ tp{self.to_tp}, {self.batch} requests of {self.context} tokens"
        lone = "" if self.kind == "prefill" else f" on {self.replicas} replica{'s' * (self.replicas > 1)}"
        return f"{self.kind} tp{self.tp}, batch {self.batch} × {self.context} tokens{lone}"


def list_points(grid: Grid, limits: Limits) -> list[Point]:
    """Every point that fits, in the order of measurement.

    Short contexts come first, there the smallest and the largest batch, then those between.  Layouts take turns at each
    batch and context: what disturbs the machine for a while falls on all, and a policy compares layouts.

    Raises:
        UsageError: more than a profile may have.
    """
    rounds = range(max(map(len, grid.as_lists().values())))
    points = [point for number in rounds for point in _round(grid, limits, number)]
    for kind, most in (
        ("decode", MOST_POINTS),
        ("prefill", MOST_POINTS),
        ("switch", MOST_POINTS // (2 * SWITCH_ROUNDS)),
    ):
        if (count := sum(point.kind == kind for point in points)) > most:
            raise UsageError(f"--grid: {count} {kind} points, a profile has at most {most}; give fewer numbers")
    return points


def _round(grid: Grid, limits: Limits, number: int) -> Iterator[Point]:
    """The points at the context of this number, of each kind."""
    layouts = limits.layouts
    for context in grid.context[number : number + 1]:
        for alone, batches in ((False, grid.batch), (True, grid.lone)):
            for place, batch in enumerate(_sort_coarse_first(batches)):
                for tp, dp in ((one.tp, one.dp) for one in layouts[:: -1 if place % 2 else 1]):  # the fewest switches
                    if limits.can_hold(tp, batch, compute_length_needed(context)) and not (alone and dp == 1):
                        yield Point(kind="decode", tp=tp, replicas=1 if alone else dp, batch=batch, context=context)
    for low, high in combinations(layouts, 2):
        pair = {"kind": "switch", "tp": low.tp, "to_tp": high.tp, "replicas": low.dp}
        if number == 0:
            yield Point(**pair, batch=0, context=0)
        for context in grid.switch_context[number : number + 1]:
            for requests in grid.switch_requests:
                if limits.can_hold(low.tp, -(-requests // low.dp), context + SWITCH_ANSWER):
                    yield Point(**pair, batch=requests, context=context)
    for length in grid.prefill_length[number : number + 1]:
        for batch in grid.prefill_batch:
            for layout in layouts:
                if limits.can_hold(layout.tp, batch, length + 2):
                    yield Point(kind="prefill", tp=layout.tp, replicas=layout.dp, batch=batch, context=length)


def _sort_coarse_first(values: Sequence[int]) -> list[int]:
    """Values in the order both ends, the middle, the quarters, ...: beyond the ends a policy has only a guess."""
    order, step = [*values[:1], *values[-1:]], 1 << len(values).bit_length()
    while step > 1:
        step //= 2
        order += values[step::step]
    return list(dict.fromkeys(order))


def list_required_points(points: Sequence[Point]) -> set[Point]:
    """Points without which nothing can be predicted: the first decode point of each layout with all its replicas, and
    the first switch of each pair that moves KV."""
    first: dict[tuple[int, int], Point] = {}
    for point in points:
        if point.kind == "decode" or (point.kind == "switch" and point.batch):
            first.setdefault((point.tp, point.to_tp), point)
    return set(first.values())
