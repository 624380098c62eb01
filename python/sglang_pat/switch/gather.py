"""KV in a switch as PAT moves it (section 4.3, Fig. 7), to compare with: all get everything and cut their part out.

All ranks of the larger TP group take part, each with the whole KV that it holds of requests that move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_pat.layout import ParallelLayout
from sglang_pat.switch.plan import GroupPlan, LiveRequest, head_slices, incoming, kv_head_range, outgoing


@dataclass(frozen=True)
class Take:
    """What a rank cuts out of the KV of one member.

    Attributes:
        member: index in the group.
        first: first of its slots; there is one for each of ``slots``.
        slots: where they go in the new pool view, int64.
        src_head, dst_head, count: KV heads, local to each side's shard.
    """

    member: int
    first: int
    slots: np.ndarray
    src_head: int
    dst_head: int
    count: int


@dataclass(frozen=True)
class Gather:
    """One rank's side of the all-gather, the same for every layer.

    Attributes:
        send_slots: slots of the old pool view, int64.
        counts: number of slots of each member.
        heads: KV heads of each member's shard.
        takes: what this rank keeps.
    """

    send_slots: np.ndarray
    counts: list[int]
    heads: int
    takes: list[Take]


def build_gather(
    old: ParallelLayout,
    new: ParallelLayout,
    kv_heads: int,
    members: Sequence[int],
    rank: int,
    plans: dict[int, GroupPlan],
    old_rows: Sequence[np.ndarray],
    requests: Sequence[LiveRequest],
) -> Gather:
    """This rank's part.  Arguments as of :func:`~sglang_pat.switch.plan.build_exchange`, but ``members``: the ranks of
    its larger TP group.
    """
    dests = sorted(plans)
    group, mine = old.group_of(rank), new.group_of(rank)
    takes = []
    for piece in head_slices(old, new, kv_heads, members, rank):
        source = old.group_of(piece.src)
        first = sum(plans[dest].fresh.get(source, 0) for dest in dests if dest < mine)
        slots = incoming(plans[mine], source)
        takes.append(Take(members.index(piece.src), first, slots, piece.src_head, piece.dst_head, piece.count))
    return Gather(
        send_slots=np.concatenate([outgoing(plans[dest], group, old_rows, requests) for dest in dests]),
        counts=[sum(plans[dest].fresh.get(old.group_of(member), 0) for dest in dests) for member in members],
        heads=kv_head_range(kv_heads, old, rank)[1],
        takes=takes,
    )
