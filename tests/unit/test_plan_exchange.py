"""The KV plan against an oracle that moves every value by hand.

Each KV value is labelled (token, head).  The exchange of every rank is built and executed on numpy
pools; then every rank must hold, in the slots the plan names, the right values of its heads, and each
value must have travelled once, and only where it was needed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from sglang_pat.layout import ParallelLayout, exchange_groups, list_destinations
from sglang_pat.switch import plan

from .drawn import examples
from .plan_world import LENDING, LENT, Case, cases, list_heads

pytestmark = pytest.mark.unit

DIM = 5
"""Elements per head and slot in the count of bytes."""


@dataclass
class Outcome:
    """The new pools after the exchange, by rank: a slot for each slot of the plan, and what was not to be touched.

    ``travelled``: every (source, target, value); ``elements``: sent to other ranks.
    """

    pools: dict[int, np.ndarray]
    places: dict[int, np.ndarray]
    untouched: dict[int, np.ndarray]
    travelled: list[tuple[int, int, int]]
    elements: int


def old_pool(case: Case, rank: int) -> np.ndarray:
    group, heads = case.old.group_of(rank), list_heads(case.kv_heads, case.old, rank)
    pool = np.full((case.num_slots, len(heads)), -1)
    for tokens, slots in zip(case.tokens[group], case.slots[group], strict=True):
        pool[slots] = np.array(tokens, dtype=np.int64).reshape(-1, 1) * case.kv_heads + heads
    return pool


def execute(case: Case, gather: bool = False) -> Outcome:
    """Run the exchange of all ranks, the new pools lying over the old ones; ``gather``: PAT's way."""
    old, new, kv_heads = case.old, case.new, case.kv_heads
    exchanges = {}
    before = {rank: old_pool(case, rank) for rank in range(old.num_ranks)}
    pools = {rank: pool.copy().reshape(-1, len(list_heads(kv_heads, new, rank))) for rank, pool in before.items()}
    untouched = {rank: pool.copy() for rank, pool in pools.items()}
    outcome = Outcome(pools, {}, untouched, [], 0)
    for members in max(old, new).groups() if gather else exchange_groups(old, new):
        plans = {new.group_of(m): case.plans[new.group_of(m)] for m in members}
        for rank in members:
            group = old.group_of(rank)
            move = plan.KvMove(old, new, kv_heads, members, rank, plans, case.slots[group], case.live[group])
            exchanges[rank] = plan.plan_exchange(move, gather)
            place = outcome.places[rank] = exchanges[rank].place
            assert place[0] == 0 and len(set(place.tolist())) == len(place), "every slot of the plan has its own"
            # What of its own is not packed stays where it is.
            own, moves = move.list_incoming_slots(group), exchanges[rank].recv_slots[exchanges[rank].recv_offsets[-2] :]
            stays = place[own[~np.isin(place[own], moves)]]
            outcome.travelled += [(rank, rank, int(v)) for v in pools[rank][stays][:, head_part(move)].ravel()]
        last = len(members)
        routes = [(i, src, j, dst) for (i, src), (j, dst) in itertools.product(enumerate(members), repeat=2)]
        routes += [(last, rank, last, rank) for rank in members]
        for i, src, j, dst in routes:
            out, into = exchanges[src], exchanges[dst]
            assert out.heads == into.heads
            send = out.send_slots[out.send_offsets[j] : out.send_offsets[j + 1]]
            recv = into.recv_slots[into.recv_offsets[i] : into.recv_offsets[i + 1]]
            assert len(send) == len(recv), "both sides agree on the size"
            a, b = int(out.send_heads[j]), int(into.recv_heads[i])
            values = before[src][send, a : a + out.heads]
            assert values.shape == (len(send), out.heads), "heads exist on the source"
            assert pools[dst][recv, b : b + out.heads].shape == values.shape, "and on the target"
            pools[dst][recv, b : b + out.heads] = values
            outcome.travelled += [(src, dst, int(v)) for v in values.ravel()]
            if i < last:
                assert out.slots[i, j] * out.heads == into.slots[i, j] * into.heads == values.size
            else:
                assert out.moving == len(send)
        outcome.elements += sum(
            exchanges[rank].slots[i].sum() * exchanges[rank].heads * DIM for i, rank in enumerate(members)
        )
        packed = [len(exchanges[rank].send_slots) for rank in members]
        assert not gather or {exchanges[rank].most for rank in members} == {max(packed)}, "one size for all"
    return outcome


def head_part(move: plan.KvMove) -> slice:
    """The heads of a new slot that this rank had before."""
    own = next(
        piece
        for piece in plan.list_head_slices(move.old, move.new, move.kv_heads, move.members, move.rank)
        if piece.src == move.rank
    )
    return slice(own.dst_head, own.dst_head + own.count)


def check_exchange(case: Case, gather: bool = False) -> None:
    """Every rank has what it needs, each value came once, and nothing came that was there."""
    outcome = execute(case, gather)
    old, new, kv_heads = case.old, case.new, case.kv_heads
    source_of = {t: g for g, requests in enumerate(case.tokens) for tokens in requests for t in tokens}
    needed: Counter[tuple[int, int]] = Counter()
    foreign = 0
    for rank in range(new.num_ranks):
        dest, heads = new.group_of(rank), list_heads(kv_heads, new, rank)
        pool, place = outcome.pools[rank], outcome.places[rank]
        here: set[int] = set()
        for group, requests in enumerate(case.tokens):
            for tokens, row in zip(requests, case.plans[dest].rows[group], strict=True):
                if row is None:
                    continue
                expected = np.array(tokens).reshape(-1, 1) * kv_heads + heads
                assert (pool[place[row]] == expected).all()
                here.update(tokens)
        for token, head in itertools.product(here, heads):
            needed[rank, token * kv_heads + head] = 1
            own = source_of[token] == old.group_of(rank) and head in list_heads(kv_heads, old, rank)
            foreign += not own
        others = np.setdiff1d(np.arange(len(pool)), place[1:])
        assert (pool[others] == outcome.untouched[rank][others]).all(), "slots that are not in use are left alone"
        assert case.plans[dest].total == len(here) == len(place) - 1, "each live token has one slot"
    assert Counter((dst, value) for _, dst, value in outcome.travelled) == needed, "each value once, and no other"
    assert sum(src != dst for src, dst, _ in outcome.travelled) == foreign, "nothing travels to where it already is"
    assert outcome.elements == foreign * DIM


@examples(400)
@given(cases())
def test_every_value_arrives_once(case):
    event("up" if case.new.tp > case.old.tp else "down")
    event("replicated heads" if max(case.old.tp, case.new.tp) > case.kv_heads else "plain heads")
    for group, requests in enumerate(case.tokens):
        for tokens, dest, i in zip(requests, case.dests[group], itertools.count()):
            assert (case.plans[dest].rows[group][i] is not None) == bool(tokens)
    check_exchange(case)


@examples(400)
@given(st.one_of(cases(moves=LENDING), cases(roomy=False, moves=LENDING), cases(moves=LENT)))
def test_ranks_are_lent_and_taken_back(case):
    """Whoever works has all requests, and what a lent rank has stays as it is."""
    old, new = case.old, case.new
    event("tp" if old.tp != new.tp else "lend" if new.stride > old.stride else "take back")
    for group in old.working:
        assert set(case.dests[group]) <= set(list_destinations(old, new, group)) <= set(new.working)
    assert not any(case.plans[leader].total for leader in new.leaders if leader not in new.working)
    check_exchange(case)


@examples(300)
@given(cases(roomy=False))
def test_what_does_not_fit_comes_as_tokens(case):
    """Each request by itself: the first that can go on decoding, the others keep their KV as long as there is room for
    it, and a tree to keep it in."""
    refused = parked = 0
    for dest, group_plan in case.plans.items():
        used, running = 0, 0
        for group, live in enumerate(case.live):
            fresh, rows = 0, group_plan.rows[group]
            for request, row, decodes in zip(live, rows, group_plan.decodes[group], strict=True):
                if request.dest != dest or not request.tokens:
                    assert row is None and not decodes
                    continue
                new = request.tokens - request.shared
                slot = request.complete and running < case.max_requests
                together = not request.shared or rows[request.parent] is not None
                fits = together and used + new + running + slot <= case.capacity and (slot or case.keep)
                assert (row is not None) == fits, "KV that fits is kept, and no other"
                assert decodes == (fits and slot), "whoever has KV and a decode slot goes on"
                refused += not fits
                if not fits:
                    continue
                assert len(row) == request.tokens
                if request.shared:
                    assert (row[: request.shared] == rows[request.parent][: request.shared]).all()
                used, running, fresh = used + new, running + slot, fresh + new
                parked += not slot
            assert group_plan.fresh[group] == fresh
        taken = [row for rows in group_plan.rows.values() for row in rows if row is not None]
        assert set(np.concatenate([[0], *taken]).tolist()) == set(range(used + 1))
        assert group_plan.total == used
        assert running <= case.max_requests
        assert not used or used + running <= case.capacity
    event("some refused" if refused else "all fit")
    event("some parked" if parked else "none parked")
    check_exchange(case)


def again(case: Case, new: ParallelLayout, max_requests: int, capacity: int) -> Case:
    """The switch after ``case``: those that it has parked offer their KV as those do that decode, after them."""
    tokens, slots = [], []
    for dest, group_plan in case.plans.items():
        kept = [
            (not decodes, case.tokens[group][i], row)
            for group, rows in group_plan.rows.items()
            for i, (row, decodes) in enumerate(zip(rows, group_plan.decodes[group], strict=True))
            if row is not None and case.dests[group][i] == dest
        ]
        kept.sort(key=lambda found: found[0])
        # What two groups have of one prefix they have for themselves from now on.
        tokens.append([[token * case.new.dp + dest for token in own] for _, own, _ in kept])
        slots.append([row for _, _, row in kept])
    return Case(case.new, new, case.kv_heads, tokens, slots, case.num_slots, max_requests, capacity)


@examples(300)
@given(cases(roomy=False), st.booleans())
def test_what_is_parked_keeps_its_kv_at_the_next_switch(case, crowded):
    """All of it where there is room, and as much as fits where there is not; whoever finds a decode slot goes on."""
    parked = sum(not one for plan_ in case.plans.values() for each in plan_.decodes.values() for one in each)
    following = again(case, case.old, *(case.max_requests, case.capacity) if crowded else (10_000, 10_000))
    check_exchange(following)
    if not crowded:
        assert all(
            (row is not None) == decodes == (following.dests[group][i] == dest)
            for dest, group_plan in following.plans.items()
            for group, rows in group_plan.rows.items()
            for i, (row, decodes) in enumerate(zip(rows, group_plan.decodes[group], strict=True))
        )
    event("some parked" if parked else "none parked")


@examples(200)
@given(st.one_of(cases(), cases(roomy=False)))
def test_pats_way_brings_the_same(case):
    check_exchange(case, gather=True)
