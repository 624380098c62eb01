"""Who gets whose capsules when groups merge: the ranks that do not hold these requests already, and no other."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_pat.layout import ParallelLayout


def outgoing(old: ParallelLayout, new: ParallelLayout, rank: int, mine: Mapping[int, bytes]) -> list[bytes]:
    """What ``rank`` sends to each rank; ``mine``: of the group that it leads, by group of the new layout."""
    own = old.group_of(rank)
    return [mine.get(new.group_of(to), b"") if old.group_of(to) != own else b"" for to in range(old.num_ranks)]


def incoming(old: ParallelLayout, new: ParallelLayout, rank: int, sizes: Mapping[int, Mapping[int, int]]) -> list[int]:
    """Bytes that come to ``rank`` from each rank; ``sizes``: of what each old group has, by group of the new layout."""
    found, own, group = [0] * old.num_ranks, old.group_of(rank), new.group_of(rank)
    for source, by_group in sizes.items():
        if source != own:
            found[old.leaders[source]] = by_group.get(group, 0)
    return found
