"""The axes along which a deployment is measured, from ``--grid`` and from what the deployment holds."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

from sglang_pat.layout import ParallelLayout
from sglang_pat.tools.commands import UsageError

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


def length_needed(context: int) -> int:
    """Tokens that a request has in the end whose window lies about ``context``."""
    return context + STEPS // 2 + 2 * SLACK


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


def nearest(values: tuple[int, ...], value: int) -> int:
    """The one of ascending ``values`` next to ``value``."""
    at = bisect_right(values, value)
    return min(values[max(at - 1, 0) : at + 1], key=lambda other: abs(other - value))


def at_most(values: tuple[int, ...], value: int) -> int:
    """The largest of ascending ``values`` that is not above ``value``, or the first."""
    return values[max(bisect_right(values, value) - 1, 0)]
