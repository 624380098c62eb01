"""How many KV tokens a rank has room for beside everything else: bytes of each part, and the most that fits."""

from __future__ import annotations

from sglang_pat.memory.demand import GIB, MIB, Demand, Supply

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
CUSTOM_ALL_REDUCE = 40 * MIB
"""Buffers of SGLang's custom all-reduce of one TP group (0.5.12: 27 to 32 MiB on Hopper, up to 40 on Blackwell)."""
TAIL_WORKSPACE = 128 * MIB
"""Attention workspace and first graphs of one layout above the base."""
GRAPH_REQUEST = 2 * MIB
"""Graphs of a layout for each request of its largest batch (SGLang's own estimate)."""


def sglang_reserve(total: int, demand: Demand) -> int:
    """What SGLang leaves free on a GPU by default for activations and graphs, bytes."""
    reserve = 512 + max(demand.prefill_tokens, 2048) * 1.5 + demand.base.tp / 8 * 1024
    reserve += demand.graph_batch * GRAPH_REQUEST / MIB
    return int((max(reserve, 10 * 1024) if total > 60 * GIB else reserve) * MIB)


def most_tokens(demand: Demand, supply: Supply) -> int:
    """Largest ``--max-total-tokens`` that fits; less than :data:`MIN_TOKENS` if nothing does."""
    return _largest(demand, supply, rank_room(demand, supply, demand.activations()))


def chosen_tokens(demand: Demand, supply: Supply) -> int | None:
    """KV tokens that a replica of the base layout gets: what was asked for, or a part of the most; None: no fit."""
    most = most_tokens(demand, supply)
    given = demand.tokens if demand.fraction is None or demand.tokens is not None else by_fraction(demand, supply)
    if given is not None:
        return given if given <= most and (demand.tokens or given >= MIN_TOKENS) else None
    if most < MIN_TOKENS:
        return None
    if supply.kind == "cpu":
        wanted = min(int(most * CPU_SHARE), CPU_TOKENS)
    else:
        wanted = _largest(demand, supply, rank_room(demand, supply, sglang_reserve(supply.total, demand)))
    return max(min(wanted, most) // TOKEN_STEP * TOKEN_STEP, MIN_TOKENS)


def by_fraction(demand: Demand, supply: Supply) -> int:
    """Tokens that ``--mem-fraction-static`` asks for."""
    assert demand.fraction is not None
    ranks = demand.base.num_ranks if supply.kind == "cpu" else 1
    static = int(demand.fraction * supply.free) // ranks - demand.shape.weight_bytes(demand.base.tp)
    return max(0, static) // demand.shape.kv_bytes(demand.base.tp) // TOKEN_STEP * TOKEN_STEP


def rank_room(demand: Demand, supply: Supply, reserve: int) -> int:
    """Bytes of a rank for KV and what grows with it; ``reserve``: bytes for activations and graphs."""
    share = supply.free
    if supply.kind == "cpu":
        share = (supply.free - CPU_OTHERS) // demand.base.num_ranks
    weights = demand.shape.weight_bytes(demand.base.tp) + demand.tail_weights
    return share - process_bytes(demand, supply) - weights - reserve


def process_bytes(demand: Demand, supply: Supply) -> int:
    """Bytes of a rank that are neither tensors of the model nor of a step."""
    if supply.kind == "cpu":
        return CPU_PROCESS
    tails = len(demand.degrees) - 1
    # Of an exchange group one for each pair of layouts.
    exchanging = tails * (tails + 1) // 2 * COMMUNICATOR
    graphs = tails * (TAIL_WORKSPACE + demand.tail_graph_batch * GRAPH_REQUEST)
    return CUDA_CONTEXT + sum(map(_group_bytes, demand.degrees)) + exchanging + graphs


def _group_bytes(tp: int) -> int:
    """Buffers of one TP group: NCCL's for eager steps and for graphs, and custom all-reduce's."""
    return 2 * COMMUNICATOR + CUSTOM_ALL_REDUCE if tp > 1 else 0


def kept(demand: Demand, supply: Supply) -> int:
    """Bytes of a rank's GPU that sleep does not give back: what is neither weights nor KV (nor, with a memory saver,
    the request table), and the activations that a step leaves in PyTorch's cache are given back, too.

    Stock SGLang keeps what an engine of one layout does.
    """
    return process_bytes(demand, supply) + demand.graph_batch * GRAPH_REQUEST


def _largest(demand: Demand, supply: Supply, room: int) -> int:
    """Most tokens of which the pool, the buffers and the table are not larger than ``room``."""
    low, high = 0, max(0, room) // demand.shape.kv_bytes(demand.base.tp)
    while low < high:
        middle = (low + high + 1) // 2
        if growing(demand, supply, middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def growing(demand: Demand, supply: Supply, tokens: int) -> int:
    """Bytes of what grows with the tokens of a replica: a rank's pool, switch buffers and request table."""
    pool = tokens * demand.shape.kv_bytes(demand.base.tp)
    return pool + int(pool * demand.buffers(supply.kind)) + demand.request_table(tokens)


def needed(demand: Demand, supply: Supply) -> int:
    """Bytes without which the demand cannot be met."""
    tokens = demand.tokens or MIN_TOKENS
    if demand.tokens is None and demand.fraction is not None:
        tokens = max(tokens, by_fraction(demand, supply))
    fixed = demand.shape.weight_bytes(demand.base.tp) + demand.tail_weights + demand.activations()
    rank = fixed + process_bytes(demand, supply) + growing(demand, supply, tokens)
    return rank if supply.kind == "cuda" else rank * demand.base.num_ranks + CPU_OTHERS
