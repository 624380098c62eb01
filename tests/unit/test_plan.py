"""The parts of the KV plan: who keeps KV, where requests go, which heads, which prefixes are shared."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.layout import ParallelLayout
from sglang_pat.switch import plan

from .drawn import examples
from .plan_world import cases, divisors, heads_of

pytestmark = pytest.mark.unit


def test_more_requests_than_decode_slots_keep_their_kv():
    """Two groups of four merge with three slots: what is left over waits, with all of its KV."""
    live = {group: [plan.LiveRequest(10, 0, -1, 0)] * 4 for group in range(2)}
    merged = plan.plan_group(0, live, 3, 100)
    assert [row is not None for rows in merged.rows.values() for row in rows] == [True] * 8
    assert merged.decodes == {0: [True, True, True, False], 1: [False] * 4}
    assert merged.total == 80


def test_a_prompt_in_pieces_waits_with_its_kv():
    live = {0: [plan.LiveRequest(10, 0, -1, 0, complete=False), plan.LiveRequest(10, 0, -1, 0)]}
    merged = plan.plan_group(0, live, 1, 20 + 1)
    assert [row is not None for row in merged.rows[0]] == [True, True] and merged.decodes[0] == [False, True]
    assert plan.plan_group(0, live, 1, 100, keep=False).rows[0][0] is None


def test_where_nothing_is_cached_only_what_decodes_keeps_its_kv():
    live = {group: [plan.LiveRequest(10, 0, -1, 0)] * 2 for group in range(2)}
    merged = plan.plan_group(0, live, 3, 100, keep=False)
    assert [row is not None for rows in merged.rows.values() for row in rows] == [True, True, True, False]


def test_a_request_that_does_not_fit_takes_no_smaller_one_with_it():
    live = {0: [plan.LiveRequest(*given) for given in ((50, 0, -1, 0), (90, 0, -1, 0), (20, 0, -1, 0), (95, 90, 1, 0))]}
    merged = plan.plan_group(0, live, 10, 100)
    assert [row is not None for row in merged.rows[0]] == [True, False, True, False]
    assert merged.total == 70


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


MERGES = [
    (ParallelLayout(low, ranks // low), ParallelLayout(high, ranks // high))
    for ranks in (2, 4, 6, 8)
    for low, high in itertools.permutations([t for t in range(1, ranks + 1) if ranks % t == 0], 2)
    if high > low and high % low == 0
]


def capsules(old: ParallelLayout, new: ParallelLayout, group: int) -> dict[int, bytes]:
    """Of an old group, for the only group that it can become part of; nothing of every third one."""
    return {new.group_of(old.leaders[group]): bytes([group]) * (7 * group + 1)} if group % 3 != 2 else {}


@pytest.mark.parametrize(("old", "new"), MERGES, ids=lambda layout: str(layout))
def test_each_rank_gets_what_it_does_not_hold(old: ParallelLayout, new: ParallelLayout):
    sizes = {g: {to: len(data) for to, data in capsules(old, new, g).items()} for g in range(old.dp)}
    leads = set(old.leaders)
    sent = [
        plan.capsules_to_send(old, new, rank, capsules(old, new, old.group_of(rank)) if rank in leads else {})
        for rank in range(old.num_ranks)
    ]
    for rank in range(old.num_ranks):
        comes = plan.capsule_sizes(old, new, rank, sizes)
        assert comes == [len(sent[source][rank]) for source in range(old.num_ranks)]
        needed = {old.group_of(other) for other in new.group(new.group_of(rank))} - {old.group_of(rank)}
        expected = {g: data for g in needed if (data := b"".join(capsules(old, new, g).values()))}
        got = {old.group_of(source): sent[source][rank] for source in range(old.num_ranks) if comes[source]}
        assert got == expected
