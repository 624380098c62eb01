"""KV in a switch as PAT moves it (section 4.3, Fig. 7), to compare with: all get everything and cut their part out.

All ranks of the larger TP group take part, each with the whole KV that it holds of requests that move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_pat.switch.heads import kv_head_range
from sglang_pat.switch.plan import Move


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
        total: slots that its new group uses.
    """

    send_slots: np.ndarray
    counts: list[int]
    heads: int
    takes: list[Take]
    total: int


def build_gather(move: Move) -> Gather:
    """This rank's part."""
    old, members, plans = move.old, move.members, move.plans
    dests, mine = sorted(plans), move.new.group_of(move.rank)
    takes: list[Take] = []
    for piece in move.slices(move.rank):
        source = old.group_of(piece.src)
        first = sum(plans[dest].fresh.get(source, 0) for dest in dests if dest < mine)
        takes.append(
            Take(members.index(piece.src), first, move.coming(source), piece.src_head, piece.dst_head, piece.count)
        )
    return Gather(
        send_slots=np.concatenate([move.leaving(dest) for dest in dests]),
        counts=[sum(plans[dest].fresh.get(old.group_of(member), 0) for dest in dests) for member in members],
        heads=kv_head_range(move.kv_heads, old, move.rank)[1],
        takes=takes,
        total=plans[mine].total,
    )
