"""Layouts: groups, nested shards, exchange groups, candidates, placement."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from sglang_pat.layout import (
    ParallelLayout,
    exchange_groups,
    get_device_of_rank,
    list_candidate_layouts,
    list_destinations,
    list_strides,
)
from tests.unit.for_each import for_each

pytestmark = pytest.mark.unit

MAX_RANKS = 16


def divisors(n: int) -> list[int]:
    return [t for t in range(1, n + 1) if n % t == 0]


ALL = [ParallelLayout(t, n // t) for n in range(1, MAX_RANKS + 1) for t in divisors(n)]
NESTED = [
    (ParallelLayout(t, n // t), ParallelLayout(u, n // u))
    for n in range(1, MAX_RANKS + 1)
    for t, u in itertools.product(divisors(n), repeat=2)
    if u % t == 0
]
"""Pairs of layouts, the lower degree first, whose degrees divide."""


def interval(layout: ParallelLayout, rank: int) -> tuple[Fraction, Fraction]:
    """The part of every sharded tensor that ``rank`` holds, by the definition of tensor parallelism."""
    part = Fraction(layout.group(layout.group_of(rank)).index(rank), layout.tp)
    return part, part + Fraction(1, layout.tp)


@for_each([(layout,) for layout in ALL])
def test_groups_partition_the_ranks(layout):
    groups = layout.groups()
    assert len(groups) == layout.dp
    assert sorted(itertools.chain(*groups)) == list(range(layout.num_ranks))
    for index, group in enumerate(groups):
        assert len(group) == layout.tp
        assert group == sorted(group) == layout.group(index)
        assert min(group) == index == layout.leaders[index]
        for place, rank in enumerate(group):
            assert (layout.group_of(rank), layout.tp_rank(rank)) == (index, place)


STRIDED = [layout.with_stride(s) for layout in ALL for s in divisors(layout.dp)]


@for_each([(layout,) for layout in STRIDED])
def test_lent_ranks_are_whole_groups(layout):
    working = {rank for leader in layout.working for rank in layout.group(leader)}
    assert working == set(range(0, layout.num_ranks, layout.stride)), "the same in every layout"
    assert sorted(working | set(layout.lent)) == list(range(layout.num_ranks))
    assert not working & set(layout.lent)
    small = ParallelLayout(layout.tp, layout.dp // layout.stride)
    groups = [[rank * layout.stride for rank in group] for group in small.groups()]
    assert groups == [layout.group(leader) for leader in layout.working], "a smaller strided world"


@for_each([(layout,) for layout in ALL if layout.dp > 1])
def test_who_exchanges_when_ranks_are_lent(layout):
    candidates = list_candidate_layouts(layout.with_tp(1), divisors(layout.num_ranks)) if chain(layout) else []
    for stride in divisors(layout.dp)[1:]:
        lent = layout.with_stride(stride)
        groups = exchange_groups(layout, lent)
        assert groups == exchange_groups(lent, layout)
        assert groups == [list(range(i, i + stride)) for i in range(0, layout.num_ranks, stride)]
        assert all({layout.tp_rank(rank) for rank in group} == {layout.tp_rank(group[0])} for group in groups)
        if candidates:
            assert stride in list_strides(candidates)


def chain(layout: ParallelLayout) -> bool:
    """Whether all degrees of so many ranks can be candidates together."""
    return all(high % low == 0 for low, high in itertools.pairwise(divisors(layout.num_ranks)))


def test_which_strides_there_are():
    assert list_strides(list_candidate_layouts(ParallelLayout(1, 8))) == [2, 4, 8]
    assert list_strides(list_candidate_layouts(ParallelLayout(2, 4), [2, 8])) == [4]
    assert list_strides(list_candidate_layouts(ParallelLayout(1, 8), [1, 2, 4])) == []
    assert list_strides([ParallelLayout(2, 1)]) == []


@pytest.mark.parametrize("stride", [0, -1, 3, 8])
def test_a_stride_that_splits_a_group_is_refused(stride):
    with pytest.raises(ValueError, match=f"stride {stride}: must divide the 4 groups of tp=2"):
        ParallelLayout(2, 4, stride)


def test_what_a_switch_does_is_one_of_two():
    with pytest.raises(AssertionError, match="in one switch"):
        list_destinations(ParallelLayout(1, 4), ParallelLayout(2, 2, 2), 0)


@for_each(NESTED)
def test_exchange_groups(low, high):
    groups = exchange_groups(low, high)
    assert groups == exchange_groups(high, low)
    assert sorted(itertools.chain(*groups)) == list(range(low.num_ranks))
    for group in groups:
        assert group == sorted(group)
        assert len(group) == high.tp // low.tp
        assert len({low.tp_rank(rank) for rank in group}) == 1
        assert len({high.group_of(rank) for rank in group}) == 1
        # Each brings another group's requests, and together they hold what one of them held.
        assert len({low.group_of(rank) for rank in group}) == len(group)
        assert sum(end - start for start, end in (interval(high, rank) for rank in group)) == Fraction(1, low.tp)


def test_ranks_outside_an_exchange_group_have_nothing_for_it():
    """What a rank needs from its new group's old groups, for its new shard, only members hold."""
    for low, high in NESTED:
        members = {rank: group for group in exchange_groups(low, high) for rank in group}
        for rank in range(low.num_ranks):
            start, end = interval(high, rank)
            sources = {low.group_of(peer) for peer in high.group(high.group_of(rank))}
            holders = [
                peer
                for peer in range(low.num_ranks)
                if low.group_of(peer) in sources
                and max(start, interval(low, peer)[0]) < min(end, interval(low, peer)[1])
            ]
            assert holders == members[rank]


def test_examples_of_the_design():
    assert ParallelLayout(2, 4).groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ParallelLayout(4, 2).groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert list(ParallelLayout(2, 4).leaders) == [0, 1, 2, 3]
    assert str(ParallelLayout(2, 4)) == "tp2×dp4"
    assert exchange_groups(ParallelLayout(2, 4), ParallelLayout(8, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("tp", "dp"), [(0, 2), (2, 0), (-1, 1)])
def test_impossible_layout(tp, dp):
    with pytest.raises(ValueError, match=f"tp={tp}, dp={dp}.*at least 1"):
        ParallelLayout(tp, dp)


@pytest.mark.parametrize("tp", [0, -2, 3, 8])
def test_with_tp_refuses(tp):
    with pytest.raises(ValueError, match=f"tp={tp} does not divide the 4 ranks"):
        ParallelLayout(1, 4).with_tp(tp)


@pytest.mark.parametrize(
    ("base", "degrees", "chain"),
    [
        ((1, 8), None, [1, 2, 4, 8]),
        ((2, 4), None, [2, 4, 8]),
        ((1, 1), None, [1]),
        ((1, 6), None, [1, 2]),
        ((3, 4), None, [3, 6, 12]),
        ((1, 12), [12, 3, 6], [1, 3, 6, 12]),
        ((1, 8), [8], [1, 8]),
        ((2, 4), [8, 2, 2], [2, 8]),
        ((1, 4), [], [1]),
    ],
)
def test_candidates(base, degrees, chain):
    layouts = list_candidate_layouts(ParallelLayout(*base), degrees)
    assert [layout.tp for layout in layouts] == chain
    assert layouts[0] == ParallelLayout(*base)
    assert {layout.num_ranks for layout in layouts} == {base[0] * base[1]}


@pytest.mark.parametrize(
    ("base", "degrees", "message"),
    [
        ((2, 2), [1, 2], "candidate tp=1 is below the base tp=2.*start with --tp 1"),
        ((1, 4), [0, 2], "candidate tp=0: a degree is at least 1"),
        ((1, 4), [-2], "candidate tp=-2: a degree is at least 1"),
        ((1, 4), [3], "candidate tp=3 does not divide the 4 ranks"),
        ((1, 4), [8], "candidate tp=8 does not divide the 4 ranks"),
        ((1, 12), [4, 6], r"candidates \[1, 4, 6\]: 4 does not divide 6.*nest"),
        ((2, 3), [3], r"candidates \[2, 3\]: 2 does not divide 3.*nest"),
    ],
)
def test_candidates_refused(base, degrees, message):
    with pytest.raises(ValueError, match=message):
        list_candidate_layouts(ParallelLayout(*base), degrees)


def test_placement_of_the_design():
    """Low-degree groups are neighbours: tp=2 on GPU pairs, tp=4 on halves."""

    def devices(tp):
        return [sorted(get_device_of_rank(r, 8) for r in group) for group in ParallelLayout(tp, 8 // tp).groups()]

    assert sorted(devices(2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(devices(4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [get_device_of_rank(r, 8) for r in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize("ranks", range(1, MAX_RANKS + 1))
def test_placement_is_a_permutation(ranks):
    devices = [get_device_of_rank(rank, ranks) for rank in range(ranks)]
    assert sorted(devices) == list(range(ranks))
    if ranks & (ranks - 1):
        assert devices == list(range(ranks))
        return
    for tp in divisors(ranks):
        for group in ParallelLayout(tp, ranks // tp).groups():
            block = sorted(get_device_of_rank(rank, ranks) for rank in group)
            assert block == list(range(block[0], block[0] + tp)), "a group is a block of neighbours"
