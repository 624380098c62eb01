"""Capsules go to the ranks that need them, and both sides agree on how many bytes."""

from __future__ import annotations

import itertools

import pytest

from sglang_pat.layout import ParallelLayout
from sglang_pat.switch import plan

pytestmark = pytest.mark.unit

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
