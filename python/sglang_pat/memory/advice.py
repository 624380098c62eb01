"""Whether another base degree would serve better: said once at start, and never a reason to refuse.

The weights of the base layout stay where they are, so they bound the room for KV in *every* layout.  Where they leave
little, requests wait or are put back, and no switch makes up for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sglang_pat.layout import ParallelLayout, list_candidate_layouts
from sglang_pat.memory.plan import MemoryPlan, choose_tokens, format_flags
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile

REQUESTS, CONTEXT = 512, 4096
"""Room for so many requests of so many tokens each is enough."""

MORE_ROOM = 1.5
"""A higher base is named if it has room for so many times the KV tokens."""

ENOUGH_ROOM = 0.8
"""Then it is the lowest one with so much of the most room that any has."""

MORE_SPEED = 1.1
"""With a profile also: if its full replicas, of requests of ``CONTEXT`` tokens, make so many times the tokens a
second."""

ENOUGH_SPEED = 0.95
"""Then it is the lowest one with so much of the highest speed."""


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

    On a GPU only: on a CPU the plan takes less than it could.  None also if the user has set the room.

    Args:
        profile: of the planned engine, if there is one.
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
    predictor = Predictor(profile)
    speed = {layout: _compute_full_speed(plan, layout, tokens, predictor) for layout, tokens in pools.items()}
    speed = {layout: value / speed[demand.base] for layout, value in speed.items()}
    fast = _find_lowest(speed, MORE_SPEED, ENOUGH_SPEED)
    return BetterBase(layout=fast, room=room[fast], speed=speed[fast]) if fast else None


def _find_lowest(values: Mapping[ParallelLayout, float], more: float, enough: float) -> ParallelLayout | None:
    """The lowest degree with ``enough`` of the largest value, if that is ``more`` times the first one's, which is 1."""
    most = max(values.values())
    found = min((layout for layout, value in values.items() if value >= enough * most), key=lambda layout: layout.tp)
    return found if values[found] >= more else None


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
    """One line if KV is short in the planned engine and a higher base has more; arguments as of
    :func:`find_better_base`."""
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
