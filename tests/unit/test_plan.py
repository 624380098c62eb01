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
from .plan_world import Case, cases

pytestmark = pytest.mark.unit


@examples(300)
@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(0, 5), st.integers(1, 8))
def test_balance(weights, first, bins):
    bins = range(first, first + bins)
    result = plan.balance_bins(weights, bins)
    assert result == plan.balance_bins(list(weights), list(bins))
    assert len(result) == len(weights) and set(result) <= set(bins)
    load = [sum(w + 1 for w, b in zip(weights, result, strict=True) if b == which) for which in bins]
    assert max(load) - min(load) <= max(weights, default=0) + 1


def test_balance_spreads_requests_without_tokens():
    assert Counter(plan.balance_bins([0] * 8, range(4))) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert plan.balance_bins([5, 5, 1, 9], [2, 4]) == [4, 4, 2, 2]


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 8), (4, 8), (1, 4), (2, 4), (3, 6)])
def test_copies_of_a_head_share_the_sending(kv_heads, tp):
    """Lowering from more ranks than KV heads: no holder of a head sends more than its part."""
    old, new = ParallelLayout(tp, 1), ParallelLayout(1, tp)
    members = list(range(tp))
    slices = [s for dst in members for s in plan.list_head_slices(old, new, kv_heads, members, dst)]
    sent = Counter(s.src for s in slices if s.src != s.dst)
    holders = tp // kv_heads
    assert all(sent[rank] == (tp - holders) / holders for rank in members)


def test_requests_that_share_anything_but_a_prefix():
    rows = [np.array([1, 2, 3]), np.array([4, 2])]
    with pytest.raises(AssertionError, match="not a common prefix"):
        plan.find_shared_prefixes(rows, [0, 0], 10)
    # Sharing over different destinations is none.
    assert plan.find_shared_prefixes(rows, [0, 1], 10) == [(0, -1), (0, -1)]


def test_shared_prefix_tree():
    """A grandchild shares with whichever request of its destination brought the last shared slot."""
    a, b, c, d = ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6], [1, 7])
    rows = [np.array(row) for row in (a, b, c, d)]
    assert plan.find_shared_prefixes(rows, [0, 0, 0, 0], 10) == [(0, -1), (2, 0), (3, 1), (1, 0)]
    assert plan.find_shared_prefixes(rows, [0, 1, 1, 0], 10) == [(0, -1), (0, -1), (3, 1), (1, 0)]
    assert plan.find_shared_prefixes([np.empty(0, np.int64)], [0], 10) == [(0, -1)]


MERGES = [
    (ParallelLayout(low, ranks // low), ParallelLayout(high, ranks // high))
    for ranks in (2, 4, 6, 8)
    for low, high in itertools.permutations([t for t in range(1, ranks + 1) if ranks % t == 0], 2)
    if high > low and high % low == 0
]


def capsules(old: ParallelLayout, new: ParallelLayout, group: int) -> dict[int, bytes]:
    """Capsules of an old group, for the only group that it can become part of; nothing of every third one."""
    return {new.group_of(old.leaders[group]): bytes([group]) * (7 * group + 1)} if group % 3 != 2 else {}


@pytest.mark.parametrize(("old", "new"), MERGES, ids=lambda layout: str(layout))
def test_each_rank_gets_what_it_does_not_hold(old: ParallelLayout, new: ParallelLayout):
    sizes = {g: {to: len(data) for to, data in capsules(old, new, g).items()} for g in range(old.dp)}
    leads = set(old.leaders)
    sent = [
        plan.list_capsules_to_send(old, new, rank, capsules(old, new, old.group_of(rank)) if rank in leads else {})
        for rank in range(old.num_ranks)
    ]
    for rank in range(old.num_ranks):
        comes = plan.list_capsule_sizes(old, new, rank, sizes)
        assert comes == [len(sent[source][rank]) for source in range(old.num_ranks)]
        needed = {old.group_of(other) for other in new.group(new.group_of(rank))} - {old.group_of(rank)}
        expected = {g: data for g in needed if (data := b"".join(capsules(old, new, g).values()))}
        got = {old.group_of(source): sent[source][rank] for source in range(old.num_ranks) if comes[source]}
        assert got == expected


@examples(300)
@given(cases(roomy=False))
def test_what_is_kept_by_slot_follows_its_token(case: Case):
    """Each new group has it of every token that brings its KV, wherever its slots are, and of no other."""
    for dest in case.new.leaders:
        found = np.full(case.plans[dest].total + 1, -1)
        for group, (live, slots) in enumerate(zip(case.live, case.slots, strict=True)):
            known = np.full(case.num_slots, -1)
            for tokens, row in zip(case.tokens[group], slots, strict=True):
                known[row] = tokens
            once = plan.list_slots_once(live, slots)
            old, new = plan.match_slots(live, once, case.plans[dest].rows[group])
            assert (found[new] == -1).all(), "each slot once"
            found[new] = known[old]
            for tokens, row in zip(case.tokens[group], case.plans[dest].rows[group], strict=True):
                assert row is None or found[row].tolist() == tokens
        assert (found[1:] >= 0).all()
