"""Who gets how much memory, decided before anything is allocated; what does not fit is refused with what would.

A GPU belongs to one rank; on a CPU all ranks, and whoever else is on the machine, share its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_pat.layout import ParallelLayout, candidate_layouts
from sglang_pat.memory.shapes import ModelShape

MIB, GIB = 1 << 20, 1 << 30

MIN_TOKENS = 1024
"""A replica with room for less is of no use."""
TOKEN_STEP = 256
"""Planned pools are multiples of this."""
CPU_SHARE = 0.5
"""Of what is left on a CPU after everything else, the part for KV: the rest is for the page cache and for others."""
CPU_TOKENS = 32_768
"""Most tokens that a replica on a CPU plans by itself: its pool is written once at start, which takes seconds a GB."""
CPU_OTHERS = 1 * GIB
"""Server, coordinator, detokenizer and the pages that forked ranks share (measured: 0.9 GiB)."""
CPU_PROCESS = 256 * MIB
"""A rank's own beside weights and KV (measured: 100 MiB)."""
CUDA_CONTEXT = 1 * GIB
"""Context, cuBLAS and attention workspaces of a rank."""
COMMUNICATOR = 256 * MIB
"""Buffers of one NCCL communicator."""
TAIL_WORKSPACE = 128 * MIB
"""Attention workspace and first graphs of one layout above the base."""
GRAPH_REQUEST = 2 * MIB
"""Graphs of a layout for each request of its largest batch (SGLang's own estimate)."""
MOST_SAMPLED = 256
"""Requests whose logits a step is expected to hold at once."""


class DoesNotFit(ValueError):
    """One line: what was asked for, what is free, what would fit."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Memory to plan with."""

    kind: str
    """``cpu`` or ``cuda``."""
    free: int
    """Bytes that can be taken: on the GPU that has least, or on the whole machine."""
    total: int
    """Bytes of that GPU or of the machine."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """An engine to be started."""

    shape: ModelShape
    base: ParallelLayout
    degrees: tuple[int, ...]
    """TP degrees of all layouts, lowest (the base) first."""
    prefill_tokens: int
    """Most tokens of a prefill step (``--chunked-prefill-size``)."""
    graph_batch: int = 0
    """Largest batch with a CUDA graph; 0 without graphs."""
    tail_graph_batch: int = 0
    """The same of the layouts above the base."""
    max_running: int | None = None
    tokens: int | None = None
    """``--max-total-tokens``, if given: KV tokens of a replica of the base layout."""
    fraction: float | None = None
    """``--mem-fraction-static``, if given: weights and KV of all ranks, as a part of what is free."""
    tail_weights: int = 0
    """Bytes of a rank for weights of layouts above the base that are not views of its base shard."""
    gathers: bool = False
    """A switch brings all KV of a group to each of its ranks (``--pat-kv-exchange allgather``)."""

    def request_table(self, tokens: int) -> int:
        """Bytes of SGLang's table of token places with a pool of so many tokens."""
        rows = max(min(tokens * 512 // self.shape.context, 4096), 2048)
        rows = min(rows, tokens // 2 if self.max_running is None else self.max_running)
        return (rows + 1) * (self.shape.context + 4) * 4

    def activations(self) -> int:
        """Bytes of the largest step."""
        shape, tp = self.shape, self.base.tp
        wide = 8 * shape.hidden + 3 * shape.intermediate // tp + 2 * shape.heads // tp * shape.head_dim
        logits = min(self.max_running or MOST_SAMPLED, MOST_SAMPLED) * shape.vocab * 4 * 4
        return self.prefill_tokens * wide * shape.item + logits

    def buffers(self, kind: str) -> float:
        """Bytes that KV goes through in a switch, for each byte of the pool."""
        low, high = self.degrees[0], self.degrees[-1]
        if high == low:
            return 0.0
        local = self.shape.local_kv_heads
        # With more ranks than KV heads a head goes to several.
        copies = high // low if self.gathers else high // low * local(high) / local(low)
        return (2 if kind == "cpu" else 3) * max(1.0, copies) / self.shape.layers


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of one rank, in bytes; all ranks are alike."""

    demand: Demand
    supply: Supply
    tokens: int
    """KV tokens of a replica of the base layout."""
    parts: tuple[tuple[str, int], ...]
    """``(what, bytes)`` of a rank."""
    others: int
    """Bytes of the engine's other processes, where they share the memory."""

    @property
    def rank_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def total_bytes(self) -> int:
        """What is taken of :attr:`Supply.free`."""
        return self.rank_bytes if self.supply.kind == "cuda" else self.rank_bytes * self.ranks + self.others

    @property
    def ranks(self) -> int:
        return self.demand.base.num_ranks

    @property
    def static_fraction(self) -> float:
        """Weights and KV as a part of what a rank on a GPU finds free once its groups stand (SGLang's measure)."""
        parts = dict(self.parts)
        found = self.supply.free - parts["context, communicators"]
        return (parts["weights"] + parts["other layouts"] + parts["KV"]) / found

    def table(self) -> str:
        """The plan in a few lines."""
        where = "each GPU has" if self.supply.kind == "cuda" else "the machine has"
        head = f"{self.demand.base}, {self.ranks} ranks; {where} {_size(self.supply.free)} free"
        rows = [(f"{what}, {self.tokens:,} tokens" if what == "KV" else what, size) for what, size in self.parts]
        rows.append(("a rank", self.rank_bytes))
        if self.supply.kind == "cpu":
            rows += [("other processes", self.others), (f"{self.ranks} ranks and those", self.total_bytes)]
        rows.append(("left free", self.supply.free - self.total_bytes))
        width = max(len(what) for what, _ in rows)
        return "\n".join([f"memory plan: {head}", *(f"  {what:{width}}  {_size(size):>10}" for what, size in rows)])


def advice(plan: MemoryPlan) -> str | None:
    """One line if a request as long as the model takes does not fit into a replica, and another layout has more room.

    Not on a CPU, where the plan takes less than it could.
    """
    demand, supply, longest = plan.demand, plan.supply, plan.demand.shape.context
    if supply.kind == "cpu" or plan.tokens >= longest:
        return None
    free = replace(demand, tokens=None, fraction=None)
    found = [(layout, _choose(_with_base(free, layout), supply) or 0) for layout in _other_layouts(free, supply)]
    better = next(((layout, tokens) for layout, tokens in found if tokens >= longest), None)
    layout, tokens = better or max(found, key=lambda pair: pair[1], default=(demand.base, 0))
    if tokens <= plan.tokens:
        return None
    return (
        f"a replica has room for {plan.tokens:,} KV tokens, the longest request of this model has {longest:,}: "
        f"--tp {layout.tp} --dp {layout.dp} has room for {tokens:,}"
    )


def _with_base(demand: Demand, layout: ParallelLayout) -> Demand:
    return replace(demand, base=layout, degrees=demand.shape.allowed(candidate_layouts(layout)))


def host_reserve(total: int, demand: Demand) -> int:
    """What SGLang leaves free on a GPU by default for activations and graphs, bytes."""
    reserve = 512 + max(demand.prefill_tokens, 2048) * 1.5 + demand.base.tp / 8 * 1024
    reserve += demand.graph_batch * GRAPH_REQUEST / MIB
    return int((max(reserve, 10 * 1024) if total > 60 * GIB else reserve) * MIB)


def make_plan(demand: Demand, supply: Supply) -> MemoryPlan:
    """The plan of an engine.

    Raises:
        DoesNotFit: with a layout, or a number of tokens, that would fit.
    """
    tokens = _choose(demand, supply)
    if tokens is None:
        raise DoesNotFit(_refusal(demand, supply))
    return _plan(demand, supply, tokens)


def most_tokens(demand: Demand, supply: Supply) -> int:
    """Largest ``--max-total-tokens`` that fits; less than :data:`MIN_TOKENS` if nothing does."""
    return _largest(demand, supply, _room(demand, supply, demand.activations()))


def _choose(demand: Demand, supply: Supply) -> int | None:
    most = most_tokens(demand, supply)
    given = demand.tokens if demand.fraction is None or demand.tokens is not None else _by_fraction(demand, supply)
    if given is not None:
        return given if given <= most and (demand.tokens or given >= MIN_TOKENS) else None
    if most < MIN_TOKENS:
        return None
    if supply.kind == "cpu":
        wanted = min(int(most * CPU_SHARE), CPU_TOKENS)
    else:
        wanted = _largest(demand, supply, _room(demand, supply, host_reserve(supply.total, demand)))
    return max(min(wanted, most) // TOKEN_STEP * TOKEN_STEP, MIN_TOKENS)


def _by_fraction(demand: Demand, supply: Supply) -> int:
    """Tokens that ``--mem-fraction-static`` asks for."""
    assert demand.fraction is not None
    ranks = demand.base.num_ranks if supply.kind == "cpu" else 1
    static = int(demand.fraction * supply.free) // ranks - demand.shape.weight_bytes(demand.base.tp)
    return max(0, static) // demand.shape.kv_bytes(demand.base.tp) // TOKEN_STEP * TOKEN_STEP


def _room(demand: Demand, supply: Supply, reserve: int) -> int:
    """Bytes of a rank for KV and what grows with it."""
    share = supply.free
    if supply.kind == "cpu":
        share = (supply.free - CPU_OTHERS) // demand.base.num_ranks
    return share - _process(demand, supply) - demand.shape.weight_bytes(demand.base.tp) - demand.tail_weights - reserve


def _process(demand: Demand, supply: Supply) -> int:
    """Bytes of a rank that are neither tensors of the model nor of a step."""
    if supply.kind == "cpu":
        return CPU_PROCESS
    tails, wide = len(demand.degrees) - 1, sum(tp > 1 for tp in demand.degrees)
    # Of each TP group one for eager steps and one for graphs, and one of an exchange group for each pair of layouts.
    communicators = 2 * wide + tails * (tails + 1) // 2
    graphs = tails * (TAIL_WORKSPACE + demand.tail_graph_batch * GRAPH_REQUEST)
    return CUDA_CONTEXT + communicators * COMMUNICATOR + graphs


def _largest(demand: Demand, supply: Supply, room: int) -> int:
    """Most tokens of which the pool, the buffers and the table are not larger than ``room``."""
    low, high = 0, max(0, room) // demand.shape.kv_bytes(demand.base.tp)
    while low < high:
        middle = (low + high + 1) // 2
        if _growing(demand, supply, middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _growing(demand: Demand, supply: Supply, tokens: int) -> int:
    pool = tokens * demand.shape.kv_bytes(demand.base.tp)
    return pool + int(pool * demand.buffers(supply.kind)) + demand.request_table(tokens)


def _plan(demand: Demand, supply: Supply, tokens: int) -> MemoryPlan:
    pool = tokens * demand.shape.kv_bytes(demand.base.tp)
    # What SGLang leaves free by default, where that is possible.
    spare = _room(demand, supply, 0) - _growing(demand, supply, tokens)
    reserve = demand.activations()
    if supply.kind == "cuda":
        reserve = min(max(host_reserve(supply.total, demand), reserve), spare)
    parts = (
        ("weights", demand.shape.weight_bytes(demand.base.tp)),
        ("other layouts", demand.tail_weights),
        ("KV", pool),
        ("switch buffers", int(pool * demand.buffers(supply.kind))),
        ("request table", demand.request_table(tokens)),
        ("activations, graphs", reserve),
        ("context, communicators" if supply.kind == "cuda" else "process", _process(demand, supply)),
    )
    return MemoryPlan(
        demand=demand, supply=supply, tokens=tokens, parts=parts, others=CPU_OTHERS if supply.kind == "cpu" else 0
    )


def _refusal(demand: Demand, supply: Supply) -> str:
    if demand.tokens is None and demand.fraction is not None:
        tokens = _by_fraction(demand, supply)
        if tokens < MIN_TOKENS <= most_tokens(demand, supply):
            return (
                f"--mem-fraction-static {demand.fraction:g} leaves room for {tokens} KV tokens beside the weights, "
                f"at least {MIN_TOKENS} are needed: leave it out, or choose a larger one"
            )
    need, have = _needed(demand, supply), _size(supply.free)
    where = "each GPU has" if supply.kind == "cuda" else "the machine has"
    line = f"--tp {demand.base.tp} --dp {demand.base.dp}{_given(demand)} needs {_size(need)}, {where} {have} free"
    fits = list(alternatives(demand, supply))
    if not fits:
        return f"{line}; no layout of these ranks fits: take a smaller model or a larger machine"
    return f"{line}; {' or '.join(_flags(demand, fit) for fit in fits)} would fit"


def alternatives(demand: Demand, supply: Supply) -> Iterator[Demand]:
    """Like ``demand``, but smaller, and known to fit: fewer tokens, then another layout."""
    if demand.tokens is not None or demand.fraction is not None:
        most = most_tokens(demand, supply) // TOKEN_STEP * TOKEN_STEP
        if most >= MIN_TOKENS:
            yield replace(demand, tokens=most, fraction=None)
    for layout in _other_layouts(demand, supply):
        changed = _with_base(demand, layout)
        if _choose(changed, supply) is not None:
            yield changed
            return


def _other_layouts(demand: Demand, supply: Supply) -> Iterator[ParallelLayout]:
    """Higher degrees over the same ranks; on a CPU, where ranks share the memory, also fewer ranks."""
    ranks, shape = demand.base.num_ranks, demand.shape
    fewest = 1 if supply.kind == "cpu" else ranks
    for count in range(ranks, fewest - 1, -1):
        lowest = demand.base.tp + 1 if count == ranks else 1
        for tp in range(lowest, count + 1):
            if count % tp == 0 and shape.why_not(tp) is None:
                yield ParallelLayout(tp, count // tp)


def _needed(demand: Demand, supply: Supply) -> int:
    """Bytes without which the demand cannot be met."""
    tokens = demand.tokens or MIN_TOKENS
    if demand.tokens is None and demand.fraction is not None:
        tokens = max(tokens, _by_fraction(demand, supply))
    fixed = demand.shape.weight_bytes(demand.base.tp) + demand.tail_weights + demand.activations()
    rank = fixed + _process(demand, supply) + _growing(demand, supply, tokens)
    return rank if supply.kind == "cuda" else rank * demand.base.num_ranks + CPU_OTHERS


def _given(demand: Demand) -> str:
    if demand.tokens is not None:
        return f" --max-total-tokens {demand.tokens}"
    return f" --mem-fraction-static {demand.fraction:g}" if demand.fraction is not None else ""


def _flags(old: Demand, new: Demand) -> str:
    if new.base != old.base:
        return f"--tp {new.base.tp} --dp {new.base.dp}"
    return f"--max-total-tokens {new.tokens}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
