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

from sglang_pat.layout import ParallelLayout, exchange_groups
from sglang_pat.switch import plan
from sglang_pat.switch.gather import build_gather

from .drawn import examples

pytestmark = pytest.mark.unit

DIM = 5
"""Elements per head and slot in the count of bytes."""


def divisors(n: int) -> list[int]:
    return [t for t in range(1, n + 1) if n % t == 0]


def heads_of(kv_heads: int, layout: ParallelLayout, rank: int) -> list[int]:
    """Heads of a rank as SGLang deals them: evenly, or one to neighbours."""
    tp_rank = layout.group(layout.group_of(rank)).index(rank)
    if layout.tp >= kv_heads:
        return [tp_rank // (layout.tp // kv_heads)]
    per_rank = kv_heads // layout.tp
    return list(range(tp_rank * per_rank, (tp_rank + 1) * per_rank))


MOVES = [
    (ParallelLayout(t, n // t), ParallelLayout(u, n // u))
    for n in (2, 4, 8, 6)
    for t, u in itertools.product(divisors(n), repeat=2)
    if t != u and max(t, u) % min(t, u) == 0
]
"""Switches ``(old, new)`` in both directions."""


@dataclass
class Case:
    """Random requests of every old group.

    ``tokens[g][i]``: identity of each token of request ``i`` (equal where a prefix is shared);
    ``slots[g][i]``: its slots in the group's old pools.
    """

    old: ParallelLayout
    new: ParallelLayout
    kv_heads: int
    tokens: list[list[list[int]]]
    slots: list[list[np.ndarray]]
    num_slots: int
    max_requests: int
    capacity: int

    def __post_init__(self) -> None:
        self.dests = [
            plan.destinations(self.old, self.new, g, [len(t) for t in tokens]) for g, tokens in enumerate(self.tokens)
        ]
        self.live = []
        for tokens, slots, dests in zip(self.tokens, self.slots, self.dests, strict=True):
            shared = plan.shared_prefixes(slots, dests, self.num_slots)
            self.live.append([plan.LiveRequest(len(t), *s, d) for t, s, d in zip(tokens, shared, dests, strict=True)])
        sources = dict(enumerate(self.live))
        self.plans = {
            dest: plan.plan_group(dest, sources, self.max_requests, self.capacity) for dest in self.new.leaders
        }


@st.composite
def cases(draw, roomy: bool = True):
    old, new = draw(st.sampled_from(MOVES))
    low, high = sorted((old.tp, new.tp))
    allowed = [k for k in range(1, 13) if all(max(k, t) % min(k, t) == 0 for t in (low, high))]
    kv_heads = draw(st.sampled_from(allowed))
    # Hypothesis favours small cases; the requests are drawn evenly.
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = rng.integers(0, 8)
    sharing = rng.choice([0.0, 0.5, 1.0])
    names = itertools.count()
    # Divisible by every ratio of heads; few are in use, at the beginning or anywhere.
    all_tokens, all_slots, num_slots = [], [], 2400
    span = rng.choice([200, num_slots])
    for _ in old.leaders:
        free = iter(rng.permutation(np.arange(1, span)))
        tokens: list[list[int]] = []
        slots: list[np.ndarray] = []
        for _ in range(rng.integers(0, most + 1)):
            row_tokens: list[int] = []
            row: list[int] = []
            if tokens and rng.random() < sharing:
                parent = rng.integers(len(tokens))
                keep = rng.integers(0, len(tokens[parent]) + 1)
                row_tokens, row = tokens[parent][:keep], list(slots[parent][:keep])
            own = int(rng.integers(0, 9))
            tokens.append(row_tokens + [next(names) for _ in range(own)])
            slots.append(np.array(row + [next(free) for _ in range(own)], dtype=np.int64))
        all_tokens.append(tokens)
        all_slots.append(slots)
    max_requests, capacity = 10_000, 10_000
    if not roomy:
        max_requests, capacity = draw(st.integers(0, 12)), draw(st.integers(1, 60))
    return Case(old, new, kv_heads, all_tokens, all_slots, num_slots, max_requests, capacity)


@dataclass
class Outcome:
    """After the exchange: by rank the new pool, its slot for each slot of the plan, and what was not to be touched.

    ``travelled``: every (source, target, value); ``elements``: sent to other ranks.
    """

    pools: dict[int, np.ndarray]
    places: dict[int, np.ndarray]
    untouched: dict[int, np.ndarray]
    travelled: list[tuple[int, int, int]]
    elements: int


def old_pool(case: Case, rank: int) -> np.ndarray:
    group, heads = case.old.group_of(rank), heads_of(case.kv_heads, case.old, rank)
    pool = np.full((case.num_slots, len(heads)), -1)
    for tokens, slots in zip(case.tokens[group], case.slots[group], strict=True):
        pool[slots] = np.array(tokens, dtype=np.int64).reshape(-1, 1) * case.kv_heads + heads
    return pool


def execute(case: Case) -> Outcome:
    """Run the exchange of all ranks, the new pools lying over the old ones."""
    old, new, kv_heads = case.old, case.new, case.kv_heads
    exchanges = {}
    before = {rank: old_pool(case, rank) for rank in range(old.num_ranks)}
    pools = {rank: pool.copy().reshape(-1, len(heads_of(kv_heads, new, rank))) for rank, pool in before.items()}
    untouched = {rank: pool.copy() for rank, pool in pools.items()}
    outcome = Outcome(pools, {}, untouched, [], 0)
    for members in exchange_groups(old, new):
        plans = {new.group_of(m): case.plans[new.group_of(m)] for m in members}
        for rank in members:
            group = old.group_of(rank)
            move = plan.Move(old, new, kv_heads, members, rank, plans, case.slots[group], case.live[group])
            exchanges[rank] = plan.build_exchange(move)
            place = outcome.places[rank] = exchanges[rank].place
            assert place[0] == 0 and len(set(place.tolist())) == len(place), "every slot of the plan has its own"
            # What of its own is not packed stays where it is.
            own, moves = move.coming(group), exchanges[rank].recv_slots[exchanges[rank].recv_offsets[-2] :]
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
                assert out.elements(DIM)[i, j] == into.elements(DIM)[i, j] == values.size * DIM
            else:
                assert out.moving == len(send)
        outcome.elements += sum(exchanges[rank].elements(DIM)[i].sum() for i, rank in enumerate(members))
    return outcome


def head_part(move: plan.Move) -> slice:
    """Of a new slot, the heads that this rank had before."""
    own = next(piece for piece in move.slices(move.rank) if piece.src == move.rank)
    return slice(own.dst_head, own.dst_head + own.count)


def check_exchange(case: Case) -> None:
    outcome = execute(case)
    old, new, kv_heads = case.old, case.new, case.kv_heads
    source_of = {t: g for g, requests in enumerate(case.tokens) for tokens in requests for t in tokens}
    needed: Counter[tuple[int, int]] = Counter()
    foreign = 0
    for rank in range(new.num_ranks):
        dest, heads = new.group_of(rank), heads_of(kv_heads, new, rank)
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
            own = source_of[token] == old.group_of(rank) and head in heads_of(kv_heads, old, rank)
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


@examples(300)
@given(cases(roomy=False))
def test_what_does_not_fit_comes_as_tokens(case):
    """Each request by itself: the first go on decoding, the others keep their KV as long as there is room for it."""
    refused = parked = 0
    for dest, group_plan in case.plans.items():
        used, running = 0, 0
        for group, live in enumerate(case.live):
            fresh, rows = 0, group_plan.rows[group]
            for request, row, decodes in zip(live, rows, group_plan.decodes[group], strict=True):
                if request.dest != dest or not request.tokens:
                    assert row is None and not decodes
                    continue
                new, slot = request.tokens - request.shared, running < case.max_requests
                together = not request.shared or rows[request.parent] is not None
                fits = together and used + new + running + slot <= case.capacity
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


def test_more_requests_than_decode_slots_keep_their_kv():
    """Two groups of four merge with three slots: what is left over waits, with all of its KV."""
    live = {group: [plan.LiveRequest(10, 0, -1, 0)] * 4 for group in range(2)}
    merged = plan.plan_group(0, live, 3, 100)
    assert [row is not None for rows in merged.rows.values() for row in rows] == [True] * 8
    assert merged.decodes == {0: [True, True, True, False], 1: [False] * 4}
    assert merged.total == 80


def test_where_nothing_is_cached_only_what_decodes_keeps_its_kv():
    live = {group: [plan.LiveRequest(10, 0, -1, 0)] * 2 for group in range(2)}
    merged = plan.plan_group(0, live, 3, 100, keep=False)
    assert [row is not None for rows in merged.rows.values() for row in rows] == [True, True, True, False]


def test_a_request_that_does_not_fit_takes_no_smaller_one_with_it():
    live = {0: [plan.LiveRequest(*given) for given in ((50, 0, -1, 0), (90, 0, -1, 0), (20, 0, -1, 0), (95, 90, 1, 0))]}
    merged = plan.plan_group(0, live, 10, 100)
    assert [row is not None for row in merged.rows[0]] == [True, False, True, False]
    assert merged.total == 70


@examples(200)
@given(st.one_of(cases(), cases(roomy=False)))
def test_pats_way_ends_with_the_same_kv(case):
    """Everything gathered over the larger group, and cut: the same pools as by the exchange."""
    old, new, kv_heads = case.old, case.new, case.kv_heads
    outcome = execute(case)
    larger = max(old, new)
    for members in larger.groups():
        plans = {new.group_of(m): case.plans[new.group_of(m)] for m in members}
        gathers, staged = {}, {}
        for rank in members:
            group, heads = old.group_of(rank), heads_of(kv_heads, old, rank)
            pool = np.full((case.num_slots, len(heads)), -1)
            for tokens, slots in zip(case.tokens[group], case.slots[group], strict=True):
                pool[slots] = np.array(tokens, dtype=np.int64).reshape(-1, 1) * kv_heads + heads
            gathers[rank] = build_gather(
                plan.Move(old, new, kv_heads, members, rank, plans, case.slots[group], case.live[group])
            )
            assert gathers[rank].heads == len(heads)
            staged[rank] = pool[gathers[rank].send_slots]
        for rank in members:
            wanted = outcome.pools[rank][outcome.places[rank]]
            got = np.full_like(wanted, -1)
            assert gathers[rank].total == len(wanted) - 1
            assert gathers[rank].counts == [len(staged[m]) for m in members]
            for take in gathers[rank].takes:
                rows = staged[members[take.member]][take.first : take.first + len(take.slots)]
                part = rows[:, take.src_head : take.src_head + take.count]
                assert part.shape == (len(take.slots), take.count)
                got[take.slots, take.dst_head : take.dst_head + take.count] = part
            assert (got[1:] == wanted[1:]).all()


@examples(150)
@given(cases())
def test_destinations_stay_within_the_group(case):
    """Raising: where the old group's ranks go.  Lowering: only groups made of its own ranks, balanced."""
    for group, dests in enumerate(case.dests):
        ranks = set(case.old.group(group))
        for dest in dests:
            target = set(case.new.group(dest))
            assert ranks <= target if case.new.tp >= case.old.tp else target <= ranks
        lengths = [len(tokens) for tokens in case.tokens[group]]
        assert dests == plan.destinations(case.old, case.new, group, lengths), "the same on every rank"


@examples(300)
@given(
    st.lists(st.integers(0, 5000), max_size=40),
    st.integers(0, 5),
    st.integers(1, 8),
)
def test_balance(weights, first, bins):
    bins = range(first, first + bins)
    result = plan.balance(weights, bins)
    assert result == plan.balance(list(weights), list(bins))
    assert len(result) == len(weights) and set(result) <= set(bins)
    load = [sum(w + 1 for w, b in zip(weights, result, strict=True) if b == which) for which in bins]
    assert max(load) - min(load) <= max(weights, default=0) + 1


def test_balance_spreads_requests_without_tokens():
    assert Counter(plan.balance([0] * 8, range(4))) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert plan.balance([5, 5, 1, 9], [2, 4]) == [4, 4, 2, 2]


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 12, 16])
def test_head_ranges(ranks):
    for tp in divisors(ranks):
        layout = ParallelLayout(tp, ranks // tp)
        for kv_heads in (k for k in range(1, 33) if max(k, tp) % min(k, tp) == 0):
            for rank in range(ranks):
                first, count = plan.kv_head_range(kv_heads, layout, rank)
                assert list(range(first, first + count)) == heads_of(kv_heads, layout, rank)


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 8), (4, 8), (1, 4), (2, 4), (3, 6)])
def test_copies_of_a_head_share_the_sending(kv_heads, tp):
    """Lowering from more ranks than KV heads: no holder of a head sends more than its part."""
    old, new = ParallelLayout(tp, 1), ParallelLayout(1, tp)
    members = list(range(tp))
    slices = [s for dst in members for s in plan.head_slices(old, new, kv_heads, members, dst)]
    sent = Counter(s.src for s in slices if s.src != s.dst)
    holders = tp // kv_heads
    assert all(sent[rank] == (tp - holders) / holders for rank in members)


def test_requests_that_share_anything_but_a_prefix():
    rows = [np.array([1, 2, 3]), np.array([4, 2])]
    with pytest.raises(AssertionError, match="not a common prefix"):
        plan.shared_prefixes(rows, [0, 0], 10)
    # Sharing over different destinations is none.
    assert plan.shared_prefixes(rows, [0, 1], 10) == [(0, -1), (0, -1)]


def test_shared_prefix_tree():
    """A grandchild shares with whichever request of its destination brought the last shared slot."""
    a, b, c, d = ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [1, 7])
    rows = [np.array(row) for row in (a, b, c, d)]
    assert plan.shared_prefixes(rows, [0, 0, 0, 0], 10) == [(0, -1), (2, 0), (3, 1), (1, 0)]
    assert plan.shared_prefixes(rows, [0, 1, 1, 0], 10) == [(0, -1), (0, -1), (3, 1), (1, 0)]
    assert plan.shared_prefixes([np.empty(0, np.int64)], [0], 10) == [(0, -1)]


def test_bytes_of_the_design():
    """Design section 7: an all-to-all moves 1/t of what PAT's all-gather moves to each rank."""
    old, new = ParallelLayout(1, 8), ParallelLayout(8, 1)
    tokens, members = 100, list(range(8))
    live = {g: [plan.LiveRequest(tokens, 0, -1, 0)] for g in range(8)}
    plans = {0: plan.plan_group(0, live, 100, 10_000)}
    rows = [np.arange(1, tokens + 1)]
    sent = [
        plan.build_exchange(plan.Move(old, new, 8, members, rank, plans, rows, live[rank])).elements(1)[rank].sum()
        for rank in members
    ]
    assert sent == [tokens * 7] * 8
