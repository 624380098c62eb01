"""What does not fit is refused in one line, with what would fit instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sglang_pat.layout import ParallelLayout, candidate_layouts, default_degrees
from sglang_pat.memory.demand import Demand, Supply, size_text
from sglang_pat.memory.room import MIN_TOKENS, TOKEN_STEP, by_fraction, chosen_tokens, most_tokens, needed


def refusal(demand: Demand, supply: Supply) -> str:
    """The line for a demand that does not fit: what it needs, what is free, what would fit."""
    if demand.tokens is None and demand.fraction is not None:
        tokens = by_fraction(demand, supply)
        if tokens < MIN_TOKENS <= most_tokens(demand, supply):
            return (
                f"--mem-fraction-static {demand.fraction:g} leaves room for {tokens} KV tokens beside the weights, "
                f"at least {MIN_TOKENS} are needed: leave it out, or choose a larger one"
            )
    need, have = needed(demand, supply), size_text(supply.free)
    where = "each GPU has" if supply.kind == "cuda" else "the machine has"
    line = f"--tp {demand.base.tp} --dp {demand.base.dp}{_given(demand)} needs {size_text(need)}, {where} {have} free"
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
    for layout in other_layouts(demand, supply):
        changed = with_base(demand, layout)
        if chosen_tokens(changed, supply) is not None:
            yield changed
            return


def other_layouts(demand: Demand, supply: Supply) -> Iterator[ParallelLayout]:
    """Higher degrees over the same ranks; on a CPU, where ranks share the memory, also fewer ranks."""
    ranks, shape = demand.base.num_ranks, demand.shape
    fewest = 1 if supply.kind == "cpu" else ranks
    for count in range(ranks, fewest - 1, -1):
        lowest = demand.base.tp + 1 if count == ranks else 1
        for tp in range(lowest, count + 1):
            if count % tp == 0 and shape.why_not(tp) is None:
                yield ParallelLayout(tp, count // tp)


def with_base(demand: Demand, layout: ParallelLayout) -> Demand:
    """The same demand of an engine with another base layout, and the degrees that follow from it."""
    allowed = demand.shape.allowed(candidate_layouts(layout))
    return replace(demand, base=layout, degrees=default_degrees(allowed, only_ends=len(demand.degrees) <= 2))


def _given(demand: Demand) -> str:
    if demand.tokens is not None:
        return f" --max-total-tokens {demand.tokens}"
    return f" --mem-fraction-static {demand.fraction:g}" if demand.fraction is not None else ""


def _flags(old: Demand, new: Demand) -> str:
    if new.base != old.base:
        return f"--tp {new.base.tp} --dp {new.base.dp}"
    return f"--max-total-tokens {new.tokens}"
