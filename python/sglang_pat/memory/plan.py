"""Who gets how much memory, decided before anything is allocated; what does not fit is refused with what would.

A GPU belongs to one rank; on a CPU all ranks, and whoever else is on the machine, share its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_pat.memory.alternatives import other_layouts, refusal, with_base
from sglang_pat.memory.demand import Demand, Supply, size_text
from sglang_pat.memory.room import CPU_OTHERS, chosen_tokens, growing, kept, process_bytes, rank_room, sglang_reserve


class DoesNotFit(ValueError):
    """One line: what was asked for, what is free, what would fit."""


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

    @property
    def kept(self) -> int:
        """Bytes of a rank's GPU that sleep does not give back; 0 where ranks share the machine's memory."""
        return kept(self.demand, self.supply) if self.supply.kind == "cuda" else 0

    def table(self) -> str:
        """The plan in a few lines."""
        where = "each GPU has" if self.supply.kind == "cuda" else "the machine has"
        head = f"{self.demand.base}, {self.ranks} ranks; {where} {size_text(self.supply.free)} free"
        rows = [(f"{what}, {self.tokens:,} tokens" if what == "KV" else what, size) for what, size in self.parts]
        rows.append(("a rank", self.rank_bytes))
        if self.supply.kind == "cpu":
            rows += [("other processes", self.others), (f"{self.ranks} ranks and those", self.total_bytes)]
        rows.append(("left free", self.supply.free - self.total_bytes))
        width = max(len(what) for what, _ in rows)
        return "\n".join([f"memory plan: {head}", *(f"  {what:{width}}  {size_text(size):>10}" for what, size in rows)])


def make_plan(demand: Demand, supply: Supply) -> MemoryPlan:
    """The plan of an engine.

    Raises:
        DoesNotFit: with a layout, or a number of tokens, that would fit.
    """
    tokens = chosen_tokens(demand, supply)
    if tokens is None:
        raise DoesNotFit(refusal(demand, supply))
    return _plan(demand, supply, tokens)


def _plan(demand: Demand, supply: Supply, tokens: int) -> MemoryPlan:
    """What each part of a rank gets with a pool of so many tokens."""
    pool = tokens * demand.shape.kv_bytes(demand.base.tp)
    # What SGLang leaves free by default, where that is possible.
    spare = rank_room(demand, supply, 0) - growing(demand, supply, tokens)
    reserve = demand.activations()
    if supply.kind == "cuda":
        reserve = min(max(sglang_reserve(supply.total, demand), reserve), spare)
    parts = (
        ("weights", demand.shape.weight_bytes(demand.base.tp)),
        ("other layouts", demand.tail_weights),
        ("KV", pool),
        ("switch buffers", int(pool * demand.buffers(supply.kind))),
        ("request table", demand.request_table(tokens)),
        ("activations, graphs", reserve),
        ("context, communicators" if supply.kind == "cuda" else "process", process_bytes(demand, supply)),
    )
    return MemoryPlan(
        demand=demand, supply=supply, tokens=tokens, parts=parts, others=CPU_OTHERS if supply.kind == "cpu" else 0
    )


def advice(plan: MemoryPlan) -> str | None:
    """One line if a request as long as the model takes does not fit into a replica, and another layout has more room.

    Not on a CPU, where the plan takes less than it could.
    """
    demand, supply, longest = plan.demand, plan.supply, plan.demand.shape.context
    if supply.kind == "cpu" or plan.tokens >= longest:
        return None
    free = replace(demand, tokens=None, fraction=None)
    found = [(layout, chosen_tokens(with_base(free, layout), supply) or 0) for layout in other_layouts(free, supply)]
    better = next(((layout, tokens) for layout, tokens in found if tokens >= longest), None)
    layout, tokens = better or max(found, key=lambda pair: pair[1], default=(demand.base, 0))
    if tokens <= plan.tokens:
        return None
    return (
        f"a replica has room for {plan.tokens:,} KV tokens, the longest request of this model has {longest:,}: "
        f"--tp {layout.tp} --dp {layout.dp} has room for {tokens:,}"
    )
