"""The memory plan: who gets how much, decided before anything is allocated; what does not fit is refused.

A GPU belongs to one rank; on a CPU all ranks, and whoever else is on the machine, share its memory.  In the order of
this file: what is free (:class:`Supply`), what an engine needs (:class:`Demand`), who gets what (:class:`MemoryPlan`),
how many KV tokens that leaves, what would fit instead, and whether another base degree would serve better.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sglang_pat.layout import ParallelLayout, choose_default_degrees, list_candidate_layouts
from sglang_pat.memory.shapes import ModelShape

if TYPE_CHECKING:
    from sglang_pat.predict.predictor import Predictor
    from sglang_pat.predict.profile import Profile

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path("/")
MIN_TOKENS = 1024
"""Fewest KV tokens of a replica; one with less room is of no use."""
TOKEN_STEP = 256
"""Tokens of which planned pools are multiples."""
CPU_SHARE = 0.5
"""Share for KV of what is left on a CPU after everything else; the rest is for the page cache and for others."""
CPU_TOKENS = 32_768
"""Most tokens that a replica on a CPU plans by itself: its pool is written once at start, which takes seconds a GB."""
CPU_OTHERS = 1 * GIB
"""Bytes of server, coordinator, detokenizer and the pages that forked ranks share (measured: 0.9 GiB)."""
CPU_PROCESS = 256 * MIB
"""Bytes of a rank beside weights and KV (measured: 100 MiB)."""
CUDA_CONTEXT = 1 * GIB
"""Bytes of context, cuBLAS and attention workspaces of a rank."""
COMMUNICATOR = 256 * MIB
"""Bytes of one NCCL communicator's buffers."""
CUSTOM_ALL_REDUCE = 80 * MIB
"""Bytes of SGLang's custom all-reduce of one TP group (0.5.12: 27 to 32 MiB on Hopper, up to 40 on Blackwell; 0.5.23:
up to 80, of a group of two)."""
TAIL_WORKSPACE = 128 * MIB
"""Bytes of attention workspace and first graphs of one layout above the base."""
GRAPH_REQUEST = 2 * MIB
"""Bytes of graphs of a layout for each request of its largest batch (SGLang's own estimate)."""
MOST_SAMPLED = 256
"""Requests whose logits a step is expected to hold at once."""
TAIL_BATCH = 16
"""Largest batch with a graph above the base layout, with the default policy."""
SGLANG_DEFAULTS = {
    "v0_5_12": ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512)),
    "v0_5_23": ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512)),
}
"""SGLang's choices by memory below so many GiB: prefill chunk, largest graph batch below tp4 and from tp4 on."""
REQUESTS, CONTEXT = 512, 4096
"""Requests, and tokens of each, for which room is enough."""
MORE_ROOM = 1.5
"""Room of a base, as a multiple of the planned one's KV tokens, from which on it is named."""
ENOUGH_ROOM = 0.8
"""Share of the most room of any base that the named one must have; the lowest such base is named."""
MORE_SPEED = 1.1
"""Speed of a base, as a multiple of the planned one's, from which on it is named, where there is a profile: tokens a
second of full replicas, of requests of ``CONTEXT`` tokens."""
ENOUGH_SPEED = 0.95
"""Share of the highest speed of any base that the named one must have; the lowest such base is named."""


class DoesNotFit(ValueError):
    """Error of a plan that does not fit; one line: what was asked for, what is free, what would fit."""


# -- what is free -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Memory to plan with."""

    kind: str
    """``cpu`` or ``cuda``."""
    free: int
    """Bytes that can be taken: on the GPU that has least, or on the whole machine."""
    total: int
    """Bytes in all of that GPU, or of the machine."""

    @property
    def owner(self) -> str:
        """Beginning of a sentence on what is free."""
        return "each GPU has" if self.kind == "cuda" else "the machine has"


def measure_cpu_memory() -> Supply:
    """This machine's memory, for ranks on its CPU."""
    return Supply(kind="cpu", free=read_available_memory(), total=psutil.virtual_memory().total)


def measure_gpu_memory(text: str, ranks: int) -> Supply:
    """Empty GPUs as described: ``"8x80GB"``, GB as vendors say it, taken as GiB.

    Raises:
        ValueError: not of that form, or fewer GPUs than ranks.
    """
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)G(?:i?B)?", text, re.IGNORECASE)
    if match is None or int(match[1]) < 1 or float(match[2]) <= 0:
        raise ValueError(f"--gpus {text!r}: give a number and a size, e.g. 8x80GB")
    count, size = int(match[1]), int(float(match[2]) * GIB)
    if count < ranks:
        raise ValueError(f"{ranks} ranks need {ranks} GPUs, --gpus {text} has {count}: choose other --tp/--dp")
    return Supply(kind="cuda", free=size, total=size)


def read_available_memory(root: Path = ROOT) -> int:
    """Bytes that can be taken without swapping or hitting a cgroup limit (v1 and v2).

    Args:
        root: folder in which ``proc`` and ``sys`` lie.
    """
    return max(0, min([psutil.virtual_memory().available, *_read_cgroup_headrooms(root)]))


def _read_cgroup_headrooms(root: Path) -> list[int]:
    """Bytes left under the limit of each control group that this process is in, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms, mount = list[int](), root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that outside it: then only the mount's own group can be seen.
        folder = top / path.lstrip("/")
        for group in dict.fromkeys([folder, *folder.parents, top]):
            if group.is_relative_to(top):
                rooms += _read_room(group, *names)
    return rooms


def _read_room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """Limit minus usage of one group, bytes, if it has a limit; file cache that the kernel drops first is not usage."""
    try:
        limit, usage = int((group / limit_name).read_text()), int((group / usage_name).read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return []
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        cache = next(int(line.split()[1]) for line in lines if line.startswith(cache_name + " "))
    except (OSError, ValueError, StopIteration):
        cache = 0
    return [limit - usage + cache]


# -- what an engine needs, and what it gets ---------------------------------------------------------------------------


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
    """Largest batch with a CUDA graph of the layouts above the base; 0 without graphs."""
    max_running: int | None = None
    tokens: int | None = None
    """``--max-total-tokens``, if given: KV tokens of a replica of the base layout."""
    fraction: float | None = None
    """``--mem-fraction-static``, if given: weights and KV of all ranks as a share of what is free."""
    extra_weights: int = 0
    """Bytes of a rank beside its base shard: what no view of that is in the layouts above, and a trained drafter."""
    gathers: bool = False
    """Whether a switch brings all KV of a group to each of its ranks (``--pat-kv-exchange allgather``)."""

    def count_request_table_bytes(self, tokens: int) -> int:
        """Bytes of SGLang's table of token places with a pool of so many tokens."""
        rows = max(min(tokens * 512 // self.shape.context, 4096), 2048)
        rows = min(rows, tokens // 2 if self.max_running is None else self.max_running)
        return (rows + 1) * (self.shape.context + 4) * 4

    def count_activation_bytes(self) -> int:
        """Bytes of the largest step."""
        shape, tp = self.shape, self.base.tp
        wide = 8 * shape.hidden + shape.count_mlp_numbers(tp) + 2 * shape.heads // tp * shape.head_dim
        logits = min(self.max_running or MOST_SAMPLED, MOST_SAMPLED) * shape.vocab * 4 * 4
        return self.prefill_tokens * wide * shape.item + logits

    def count_buffer_bytes(self, kind: str) -> float:
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
    """The memory of one rank; all ranks are alike."""

    demand: Demand
    supply: Supply
    tokens: int
    """KV tokens of a replica of the base layout."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of a rank, with what SGLang leaves free on a GPU by default, as far as there is room."""
        demand, supply, tokens = self.demand, self.supply, self.tokens
        reserve = demand.count_activation_bytes()
        if supply.kind == "cuda":
            spare = supply.free - sum(compute_rank_parts(demand, supply, tokens, 0).values())
            reserve = min(compute_default_reserve(demand, supply), spare)
        return compute_rank_parts(demand, supply, tokens, reserve)

    @property
    def rank_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def total_bytes(self) -> int:
        """Bytes that are taken of :attr:`Supply.free`."""
        return count_engine_bytes(self.demand, self.supply, self.rank_bytes)

    @property
    def static_fraction(self) -> float:
        """Weights and KV as a share of what a rank on a GPU finds free once its groups stand (SGLang's measure)."""
        parts = self.parts
        free = self.supply.free - count_process_bytes(self.demand, self.supply)
        return (parts["weights"] + parts["other weights"] + parts["KV"]) / free

    @property
    def kept(self) -> int:
        """Bytes of a rank's GPU that sleep does not give back; 0 where ranks share the machine's memory.

        Weights and KV are given back (with a memory saver the request table, too), and the activations that a step
        leaves in PyTorch's cache.  Stock SGLang keeps what an engine of one layout does.
        """
        if self.supply.kind == "cpu":
            return 0
        return count_process_bytes(self.demand, self.supply) + self.demand.graph_batch * GRAPH_REQUEST

    def format_table(self) -> str:
        """The plan in a few lines."""
        ranks, free = self.demand.base.num_ranks, self.supply.free
        rows = [
            (f"{what}, {self.tokens:,} tokens" if what == "KV" else what, size) for what, size in self.parts.items()
        ]
        rows.append(("a rank", self.rank_bytes))
        if self.supply.kind == "cpu":
            rows += [("other processes", CPU_OTHERS), (f"{ranks} ranks and those", self.total_bytes)]
        rows.append(("left free", free - self.total_bytes))
        width = max(len(what) for what, _ in rows)
        head = f"memory plan: {self.demand.base}, {ranks} ranks; {self.supply.owner} {format_size(free)} free"
        return "\n".join([head, *(f"  {what:{width}}  {format_size(size):>10}" for what, size in rows)])


def make_plan(demand: Demand, supply: Supply) -> MemoryPlan:
    """The plan of an engine.

    Raises:
        DoesNotFit: with what would fit.
    """
    tokens = choose_tokens(demand, supply)
    if tokens is None:
        raise DoesNotFit(_refusal(demand, supply))
    return MemoryPlan(demand=demand, supply=supply, tokens=tokens)


# -- how many KV tokens a rank has room for ---------------------------------------------------------------------------


def compute_rank_parts(demand: Demand, supply: Supply, tokens: int, reserve: int) -> dict[str, int]:
    """Bytes of each part of a rank.

    Args:
        tokens: KV tokens of a replica of the base layout.
        reserve: bytes for activations and graphs.
    """
    shape, tp = demand.shape, demand.base.tp
    pool = tokens * shape.kv_bytes(tp)
    return {
        "weights": shape.weight_bytes(tp),
        "other weights": demand.extra_weights,
        "KV": pool,
        "switch buffers": int(pool * demand.count_buffer_bytes(supply.kind)),
        "request table": demand.count_request_table_bytes(tokens),
        "activations, graphs": reserve,
        "context, communicators" if supply.kind == "cuda" else "process": count_process_bytes(demand, supply),
    }


def count_engine_bytes(demand: Demand, supply: Supply, rank_bytes: int) -> int:
    """Bytes of :attr:`Supply.free` that the engine takes, with so many of each rank."""
    return rank_bytes if supply.kind == "cuda" else rank_bytes * demand.base.num_ranks + CPU_OTHERS


def count_needed_bytes(demand: Demand, supply: Supply, tokens: int, reserve: int) -> int:
    """:func:`count_engine_bytes` with arguments as of :func:`compute_rank_parts`."""
    return count_engine_bytes(demand, supply, sum(compute_rank_parts(demand, supply, tokens, reserve).values()))


def compute_max_tokens(demand: Demand, supply: Supply, reserve: int | None = None) -> int:
    """Largest ``--max-total-tokens`` that fits; less than :data:`MIN_TOKENS` if nothing does.

    Args:
        reserve: bytes of a rank for activations and graphs; None for the least.
    """
    reserve = demand.count_activation_bytes() if reserve is None else reserve
    sizes = range(supply.free // demand.shape.kv_bytes(demand.base.tp) + 1)
    fitting = bisect_right(sizes, supply.free, key=lambda tokens: count_needed_bytes(demand, supply, tokens, reserve))
    return max(0, fitting - 1)


def choose_tokens(demand: Demand, supply: Supply) -> int | None:
    """KV tokens that a replica of the base layout gets: what was asked for, or a share of the most; None: no fit."""
    most = compute_max_tokens(demand, supply)
    if demand.tokens is not None:
        return demand.tokens if 0 < demand.tokens <= most else None
    if demand.fraction is not None:
        return tokens if MIN_TOKENS <= (tokens := compute_tokens_by_fraction(demand, supply)) <= most else None
    if most < MIN_TOKENS:
        return None
    if supply.kind == "cpu":
        tokens = min(int(most * CPU_SHARE), CPU_TOKENS)
    else:
        tokens = compute_max_tokens(demand, supply, compute_default_reserve(demand, supply))
    return max(tokens // TOKEN_STEP * TOKEN_STEP, MIN_TOKENS)


def compute_tokens_by_fraction(demand: Demand, supply: Supply) -> int:
    """Tokens that ``--mem-fraction-static`` asks for."""
    assert demand.fraction is not None
    ranks = demand.base.num_ranks if supply.kind == "cpu" else 1
    weights = demand.shape.weight_bytes(demand.base.tp) + demand.extra_weights
    static = int(demand.fraction * supply.free) // ranks - weights
    return max(0, static) // demand.shape.kv_bytes(demand.base.tp) // TOKEN_STEP * TOKEN_STEP


def compute_default_reserve(demand: Demand, supply: Supply) -> int:
    """Bytes of a GPU for activations and graphs by default: what SGLang leaves free, or more where a step needs it."""
    reserve = 512 + max(demand.prefill_tokens, 2048) * 1.5 + demand.base.tp / 8 * 1024
    reserve += demand.graph_batch * GRAPH_REQUEST / MIB
    return max(
        int((max(reserve, 10 * 1024) if supply.total > 60 * GIB else reserve) * MIB), demand.count_activation_bytes()
    )


def count_process_bytes(demand: Demand, supply: Supply) -> int:
    """Bytes of a rank that are neither tensors of the model nor of a step."""
    if supply.kind == "cpu":
        return CPU_PROCESS
    tails = len(demand.degrees) - 1
    # Of each TP group NCCL's for eager steps and for graphs, and custom all-reduce's; of an exchange group one for each
    # pair of layouts.
    groups = sum(2 * COMMUNICATOR + CUSTOM_ALL_REDUCE for tp in demand.degrees if tp > 1)
    exchanging = tails * (tails + 1) // 2 * COMMUNICATOR
    graphs = tails * (TAIL_WORKSPACE + demand.tail_graph_batch * GRAPH_REQUEST)
    return CUDA_CONTEXT + groups + exchanging + graphs


# -- what would fit instead -------------------------------------------------------------------------------------------


def _refusal(demand: Demand, supply: Supply) -> str:
    """The line for a demand that does not fit: what it needs, what is free, what would fit."""
    most = compute_max_tokens(demand, supply) // TOKEN_STEP * TOKEN_STEP
    if demand.tokens is None and demand.fraction is not None and most >= MIN_TOKENS:
        tokens = compute_tokens_by_fraction(demand, supply)
        return (
            f"--mem-fraction-static {demand.fraction:g} leaves room for {tokens} KV tokens a replica, "
            f"{MIN_TOKENS} to {most} fit: leave it out"
        )
    flag = "" if demand.tokens is None else f" --max-total-tokens {demand.tokens}"
    need = format_size(count_needed_bytes(demand, supply, demand.tokens or MIN_TOKENS, demand.count_activation_bytes()))
    line = f"{format_flags(demand.base)}{flag} needs {need}, {supply.owner} {format_size(supply.free)} free"
    if most >= MIN_TOKENS:
        return f"{line}; --max-total-tokens {most} would fit"
    for layout in list_candidate_layouts(demand.base)[1:]:
        degrees = tuple(tp for tp in demand.degrees if tp > layout.tp)
        other = replace(demand, base=layout, degrees=(layout.tp, *degrees), tokens=None, fraction=None)
        if (
            demand.shape.find_reason_against_degree(layout.tp) is None
            and compute_max_tokens(other, supply) >= MIN_TOKENS
        ):
            return f"{line}; {format_flags(layout)} would fit"
    return f"{line}; no higher degree fits: take a smaller model or a larger machine"


def format_flags(layout: ParallelLayout) -> str:
    """The layout as flags of the command line."""
    return f"--tp {layout.tp} --dp {layout.dp}"


# -- what would serve better ------------------------------------------------------------------------------------------

#
# Said once at start, and never a reason to refuse.  The weights of the base layout stay where they are, so they bound
# the room for KV in *every* layout.  Where they leave little, requests wait or are put back, and no switch makes up for
# it.


@dataclass(frozen=True, kw_only=True)
class BetterBase:
    """A base layout that leaves more room for KV.

    Attributes:
        room: KV tokens in all its replicas together, as a multiple of the planned base's.
        speed: tokens a second of full replicas in the best layout that can be switched to, as such a multiple; None
            without a profile.
    """

    layout: ParallelLayout
    room: float
    speed: float | None = None


def find_better_base(plan: MemoryPlan, profile: Profile | None = None) -> BetterBase | None:
    """The base layout to take instead of the planned one, with another to switch to; None if that has room enough.

    The answer is None on a CPU, where the plan takes less than it could, and if the user has set the room.

    Args:
        profile: profile of the planned engine, if there is one.
    """
    demand, supply = plan.demand, plan.supply
    enough = plan.tokens * demand.base.dp >= REQUESTS * CONTEXT
    if enough or supply.kind == "cpu" or demand.tokens is not None:
        return None
    pools = {demand.base: plan.tokens}
    for layout in list_candidate_layouts(demand.base)[1:]:
        if layout.dp > 1 and demand.shape.find_reason_against_degree(layout.tp) is None:
            above = (layout.tp, *(tp for tp in demand.degrees if tp > layout.tp))
            pools[layout] = choose_tokens(replace(demand, base=layout, degrees=above), supply) or 0
    room = {layout: tokens * layout.dp / (plan.tokens * demand.base.dp) for layout, tokens in pools.items()}
    roomy = _find_lowest(room, MORE_ROOM, ENOUGH_ROOM)
    if roomy is None or profile is None:
        return BetterBase(layout=roomy, room=room[roomy]) if roomy else None
    from sglang_pat.predict.predictor import Predictor  # takes a second

    predictor = Predictor(profile)
    speed = {layout: _compute_full_speed(plan, layout, tokens, predictor) for layout, tokens in pools.items()}
    speed = {layout: value / speed[demand.base] for layout, value in speed.items()}
    fast = _find_lowest(speed, MORE_SPEED, ENOUGH_SPEED)
    return BetterBase(layout=fast, room=room[fast], speed=speed[fast]) if fast else None


def _find_lowest(values: Mapping[ParallelLayout, float], more: float, enough: float) -> ParallelLayout | None:
    """The lowest degree with ``enough`` of the largest value, if that is ``more`` times the first one's, which is 1."""
    most = max(values.values())
    lowest = min((layout for layout, value in values.items() if value >= enough * most), key=lambda layout: layout.tp)
    return lowest if values[lowest] >= more else None


def _compute_full_speed(plan: MemoryPlan, base: ParallelLayout, tokens: int, predictor: Predictor) -> float:
    """Tokens a second of full replicas, in the best layout above a base whose replicas have room for ``tokens``."""
    shape, best = plan.demand.shape, 0.0
    for tp in predictor.degrees:
        if tp >= base.tp:
            room = tokens * shape.kv_bytes(base.tp) / shape.kv_bytes(tp)
            replicas, batch = base.num_ranks // tp, max(room / CONTEXT, 1.0)
            best = max(best, replicas * batch / predictor.step_seconds(tp, batch, batch * CONTEXT))
    return best


def format_advice(plan: MemoryPlan, profile: Profile | None = None) -> str | None:
    """One line if KV is short in the planned engine and a higher base has more (:func:`find_better_base`)."""
    base, longest = plan.demand.base, plan.demand.shape.context
    better = find_better_base(plan, profile)
    if better is not None:
        faster = f", and is {better.speed:.1f} times as fast when full (by the profile)" if better.speed else ""
        return (
            f"--tp {base.tp} leaves room for {plan.tokens * base.dp:,} KV tokens in all replicas together, whatever "
            f"the engine switches to; {format_flags(better.layout)} has room for {better.room:.1f} times as many"
            f"{faster}: take it if a round needs more"
        )
    if plan.supply.kind == "cpu" or base.dp == 1 or plan.tokens >= longest:
        return None
    return (
        f"a replica has room for {plan.tokens:,} KV tokens, the longest request of this model has {longest:,}: "
        f"a degree above --tp {base.tp} has more room"
    )


# -- an engine that is not started here -------------------------------------------------------------------------------


def make_default_demand(
    shape: ModelShape, base: ParallelLayout, supply: Supply, folder: str, tokens: int | None = None
) -> Demand:
    """An engine with SGLang's own defaults, the default policy and its candidates.

    Args:
        folder: name of the adapter's folder for the SGLang that is meant (:data:`sglang_pat.version.ADAPTERS`).

    Raises:
        ValueError: the model does not allow the base degree.
    """
    if reason := shape.find_reason_against_degree(base.tp):
        raise ValueError(f"--tp {base.tp} {reason}: choose another")
    chunk, graph_batch = get_sglang_chunk_and_batch(supply.total, base.tp, folder)
    graphs = supply.kind == "cuda"
    return Demand(
        shape=shape,
        base=base,
        degrees=choose_default_degrees(shape.list_allowed_degrees(list_candidate_layouts(base)), only_ends=True),
        prefill_tokens=chunk,
        graph_batch=graph_batch if graphs else 0,
        tail_graph_batch=TAIL_BATCH if graphs else 0,
        tokens=tokens,
    )


def get_sglang_chunk_and_batch(total: int, tp: int, folder: str) -> tuple[int, int]:
    """Prefill chunk (tokens) and largest graph batch that SGLang chooses for ``total`` bytes."""
    for below, chunk, small, large in SGLANG_DEFAULTS[folder]:
        if total < below * GIB:
            return chunk, small if tp < 4 else large
    return 16384, 512


def format_size(size: int) -> str:
    """The bytes for a reader, as in ``1.5 GiB``."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
