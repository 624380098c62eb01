"""The plan of a switch: who takes which request, and where every live KV byte goes.

Pure arithmetic, the same result on every rank.

A request's KV at degree ``t`` is spread over the ``t`` ranks of its group by KV heads.  After
the switch each rank needs its head slice of all requests of its new group.  Because shards nest
(:mod:`sglang_pat.layout`), only the ranks of one exchange group have anything for each other,
and a slice travels once, straight to the rank that needs it: an all-to-all, where PAT
(section 4.3, Fig. 7) all-gathers everything and slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_pat.layout import ParallelLayout, list_destinations

# -- who takes which request -------------------------------------------------------------------------


@dataclass(frozen=True)
class LiveRequest:
    """A request as the plan sees it, in the order of its group's list.

    Attributes:
        tokens: number of KV tokens it holds; 0 if it goes over as tokens only.
        shared: number of leading tokens whose slots it shares with request ``parent`` of the same
            source group and destination (radix-tree prefix); these travel with the parent.
        parent: index in the source group's list, -1 if ``shared`` is 0.
        dest: group of the new layout it goes to.
        complete: whether all its tokens but the last have KV; else it waits for a prefill.
    """

    tokens: int
    shared: int
    parent: int
    dest: int
    complete: bool = True


def balance_bins(weights: Sequence[int], bins: Sequence[int]) -> list[int]:
    """Assign each weight to a bin, heaviest first to the lightest bin; ties to the lower one."""
    load = {b: 0 for b in bins}
    result = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        target = min(bins, key=lambda b: (load[b], b))
        result[index] = target
        # Every request costs a decode slot, so empty ones spread too.
        load[target] += weights[index] + 1
    return result


def choose_destinations(old: ParallelLayout, new: ParallelLayout, group: int, tokens: Sequence[int]) -> list[int]:
    """New group of each request of old group ``group``: the one it merges into, or a balanced split."""
    return balance_bins(tokens, list_destinations(old, new, group)) if tokens else []


def find_shared_prefixes(rows: Sequence[np.ndarray], dests: Sequence[int], num_slots: int) -> list[tuple[int, int]]:
    """``(shared, parent)`` of each request, from the KV slots it occupies.

    Args:
        rows: slot numbers of each request's tokens (empty for a request without KV).
        dests: destination group of each request; sharing counts only inside one destination.
        num_slots: number of slots of the pool.
    """
    # Index + 1; memory that is zero from the start is touched only where slots are in use.
    owner = {dest: np.zeros(num_slots, dtype=np.int32) for dest in set(dests)}
    result: list[tuple[int, int]] = []
    for index, (row, dest) in enumerate(zip(rows, dests, strict=True)):
        owners = owner[dest][row]
        taken = owners > 0
        shared = int(taken.sum())
        if not taken[:shared].all():
            raise AssertionError(
                f"requests share KV slots that are not a common prefix: request {index} has {len(row)} tokens, "
                f"{shared} of them shared, but its own begin at {np.argmin(taken)}"
            )
        result.append((shared, int(owners[shared - 1]) - 1 if shared else -1))
        owner[dest][row[shared:]] = index + 1
    return result


@dataclass(frozen=True)
class GroupPlan:
    """Slots of one new group: which requests bring KV along, and how it is numbered.

    The numbers are the plan's, the same on all ranks; which slot of its pool each is, is a rank's own business
    (``ExchangePlan.place``).

    Attributes:
        rows: for each source group, for each of its requests, the slots of its tokens
            (None for requests that come as tokens only or go elsewhere).
        decodes: for each request, whether it decodes at once; the others wait, with their KV if they have rows.
        fresh: for each source group, the number of distinct slots it sends, in order.
        total: slots used; they are ``1 .. total`` (slot 0 is SGLang's padding slot).
    """

    rows: dict[int, list[np.ndarray | None]]
    decodes: dict[int, list[bool]]
    fresh: dict[int, int]
    total: int


def plan_group(
    dest: int, sources: dict[int, Sequence[LiveRequest]], max_requests: int, capacity: int, keep: bool
) -> GroupPlan:
    """Lay out the KV of all requests that go to new group ``dest``.

    The first ``max_requests`` complete ones go on decoding.  Of the others as many bring their KV along as fit, if
    ``keep``: into the radix tree.  Whose KV does not fit, or shares a prefix with what does not come, comes as tokens.

    Args:
        max_requests: number of decode slots.
        capacity: number of KV tokens, one more for each request that decodes included.
    """
    rows: dict[int, list[np.ndarray | None]] = {}
    decodes: dict[int, list[bool]] = {}
    fresh: dict[int, int] = {}
    used, running = 0, 0
    for group in sorted(sources):
        group_rows: list[np.ndarray | None] = []
        going: list[bool] = []
        start = used
        for request in sources[group]:
            new, goes_on = request.tokens - request.shared, request.complete and running < max_requests
            orphan = request.shared and request.dest == dest and group_rows[request.parent] is None
            fits = used + new + running + goes_on <= capacity and (goes_on or keep)
            if request.dest != dest or not request.tokens or orphan or not fits:
                group_rows.append(None)
                going.append(False)
                continue
            own = np.arange(used + 1, used + new + 1, dtype=np.int64)
            if request.shared:
                above = group_rows[request.parent]
                assert above is not None, "an orphan does not come here"
                own = np.concatenate([above[: request.shared], own])
            group_rows.append(own)
            going.append(goes_on)
            used += new
            running += goes_on
        rows[group], decodes[group], fresh[group] = group_rows, going, used - start
    return GroupPlan(rows, decodes, fresh, used)


def list_slots_once(live: Sequence[LiveRequest], rows: Sequence[np.ndarray]) -> np.ndarray:
    """Slots of all tokens that a group offers, shared ones once; int64 ``[tokens]``.

    Args:
        rows: slots of each request, at least for the tokens that it offers.
    """
    parts = [row[request.shared : request.tokens] for request, row in zip(live, rows, strict=True)]
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def match_slots(
    live: Sequence[LiveRequest], old: np.ndarray, rows: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Slots of the tokens that come from a source group: there, and in the plan; int64 ``[tokens]`` each.

    Args:
        live, old: the group's offer, and :func:`list_slots_once` of it.
        rows: rows of the plan for this source, see :class:`GroupPlan`.
    """
    empty = np.empty(0, dtype=np.int64)
    *parts, _ = np.split(old, np.cumsum([request.tokens - request.shared for request in live], dtype=np.int64))
    three = zip(live, parts, rows, strict=True)
    both = [(part, row[request.shared :]) for request, part, row in three if row is not None]
    return np.concatenate([empty, *(part for part, _ in both)]), np.concatenate([empty, *(row for _, row in both)])


def list_capsules_to_send(
    old: ParallelLayout, new: ParallelLayout, rank: int, capsules: Mapping[int, bytes]
) -> list[bytes]:
    """Capsules that ``rank`` sends to each rank; ``capsules``: those of the group that it leads, by new group."""
    own = old.group_of(rank)
    return [capsules.get(new.group_of(to), b"") if old.group_of(to) != own else b"" for to in range(old.num_ranks)]


def list_capsule_sizes(
    old: ParallelLayout, new: ParallelLayout, rank: int, sizes: Mapping[int, Mapping[int, int]]
) -> list[int]:
    """Number of bytes that come to ``rank`` from each rank; ``sizes``: bytes that each old group has, by new group."""
    counts, own, group = [0] * old.num_ranks, old.group_of(rank), new.group_of(rank)
    for source, by_group in sizes.items():
        if source != own:
            counts[old.leaders[source]] = by_group.get(group, 0)
    return counts


# -- which KV heads a rank holds, and needs from whom -------------------------------------------------


@dataclass(frozen=True)
class HeadSlice:
    """KV heads that ``src`` sends to ``dst``; offsets are local to each rank's shard."""

    src: int
    dst: int
    src_head: int
    dst_head: int
    count: int


def compute_kv_head_range(kv_heads: int, layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """``(first head, number of heads)`` of ``rank``; with more ranks than heads, ranks share one."""
    parts = min(layout.tp, kv_heads)
    count = kv_heads // parts
    return layout.tp_rank(rank) * parts // layout.tp * count, count


def list_head_slices(
    old: ParallelLayout, new: ParallelLayout, kv_heads: int, members: Sequence[int], dst: int
) -> list[HeadSlice]:
    """Slices that ``dst`` needs from the members of its exchange group, each head of each old group once.

    Where several members hold the same head (more ranks than KV heads), ``dst`` takes its own
    copy if it has one, else the holders are used in turn.
    """
    first, count = compute_kv_head_range(kv_heads, new, dst)
    result: list[HeadSlice] = []
    for group in sorted({old.group_of(m) for m in members}):
        held = {m: compute_kv_head_range(kv_heads, old, m) for m in members if old.group_of(m) == group}
        chosen: dict[int, list[int]] = {}
        for head in range(first, first + count):
            having = [m for m, (begin, size) in held.items() if begin <= head < begin + size]
            source = dst if dst in having else having[members.index(dst) % len(having)]
            chosen.setdefault(source, []).append(head)
        for src, heads in sorted(chosen.items()):
            assert heads == list(range(heads[0], heads[0] + len(heads))), "heads of a source are contiguous"
            src_first, _ = held[src]
            result.append(HeadSlice(src, dst, heads[0] - src_first, heads[0] - first, len(heads)))
    return result


# -- which KV slots go where ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's side of the exchange, the same for every layer.

    ``send_*`` and ``recv_*`` have one part for each member of the exchange group, in its order, its own one empty; and
    at the end one for what changes its slot without leaving the rank.

    Attributes:
        send_slots, recv_slots: slots of the old and of the new pool view, concatenated by part (int64).
        send_offsets, recv_offsets: int64 ``[members + 2]``, where each part's slots begin.
        send_heads, recv_heads: first local head of each part's slice, int64 ``[members + 1]``.
        heads: number of KV heads in every slice.
        slots: number of slots that each member sends to each, int64 ``[members, members]``; zero on the diagonal.
        most: number of slots that the member with most of them has, where all of its own change their slots as well.
        place: slot of the new pool view for each slot of the plan, int64 ``[total + 1]``.
    """

    send_slots: np.ndarray
    send_offsets: np.ndarray
    send_heads: np.ndarray
    recv_slots: np.ndarray
    recv_offsets: np.ndarray
    recv_heads: np.ndarray
    heads: int
    slots: np.ndarray
    most: int
    place: np.ndarray

    @property
    def moving(self) -> int:
        """Number of slots whose content moves within this rank."""
        return int(self.send_offsets[-1] - self.send_offsets[-2])


@dataclass(frozen=True)
class KvMove:
    """Knowledge of a rank when KV is about to move.

    Attributes:
        kv_heads: number of KV heads of the whole model.
        members: ranks that take part, sorted: those of the exchange group, or PAT's way of the larger TP group.
        plans: the plan of every new group that a member belongs to.
        rows: slots, in this rank's old pool view, of each request of its old group.
        requests: the same requests, as the plan saw them.
    """

    old: ParallelLayout
    new: ParallelLayout
    kv_heads: int
    members: Sequence[int]
    rank: int
    plans: dict[int, GroupPlan]
    rows: Sequence[np.ndarray]
    requests: Sequence[LiveRequest]

    def list_outgoing_slots(self, dest: int) -> np.ndarray:
        """Slots of the old pool view that go from this rank's old group to new group ``dest``, each once."""
        planned = self.plans[dest].rows[self.old.group_of(self.rank)]
        return match_slots(self.requests, list_slots_once(self.requests, self.rows), planned)[0]

    def list_incoming_slots(self, source: int) -> np.ndarray:
        """Slots of the plan for the KV that comes from old group ``source`` to this rank's new group."""
        fresh = self.plans[self.new.group_of(self.rank)].fresh
        first = 1 + sum(count for group, count in fresh.items() if group < source)
        return np.arange(first, first + fresh.get(source, 0), dtype=np.int64)


def plan_exchange(move: KvMove, gather: bool = False) -> ExchangePlan:
    """Plan this rank's side of the exchange.

    Args:
        gather: whether KV moves in PAT's way (section 4.3, Fig. 7), to compare with: nothing stays in place.
    """
    old, new, members, rank = move.old, move.new, move.members, move.rank
    needed = (list_head_slices(old, new, move.kv_heads, members, dst) for dst in members)
    slices = {(s.src, s.dst): s for of_one in needed for s in of_one}
    counts = {s.count for s in slices.values()}
    assert len(counts) == 1, f"slices of one switch have one size, got {counts}"
    between = [[src != dst and (src, dst) in slices for dst in members] for src in members]
    fresh = [[move.plans[new.group_of(dst)].fresh.get(old.group_of(src), 0) for dst in members] for src in members]
    own = slices[rank, rank]
    kept, of_plan = move.list_outgoing_slots(new.group_of(rank)), move.list_incoming_slots(old.group_of(rank))
    if gather:
        place = np.arange(move.plans[new.group_of(rank)].total + 1, dtype=np.int64)
        stays = np.zeros(len(kept), dtype=bool)
    else:
        place, stays = _map_slots(move, own, kept, of_plan)
    send, recv = list[np.ndarray](), list[np.ndarray]()
    send_heads, recv_heads = list[int](), list[int]()
    empty = np.empty(0, dtype=np.int64)
    for peer in members:
        out = slices.get((rank, peer)) if peer != rank else None
        send.append(move.list_outgoing_slots(new.group_of(peer)) if out else empty)
        send_heads.append(out.src_head if out else 0)
        into = slices.get((peer, rank)) if peer != rank else None
        recv.append(place[move.list_incoming_slots(old.group_of(peer))] if into else empty)
        recv_heads.append(into.dst_head if into else 0)
    send.append(kept[~stays])
    send_heads.append(own.src_head)
    recv.append(place[of_plan[~stays]])
    recv_heads.append(own.dst_head)
    return ExchangePlan(
        send_slots=np.concatenate(send),
        send_offsets=_compute_offsets(send),
        send_heads=np.array(send_heads, dtype=np.int64),
        recv_slots=np.concatenate(recv),
        recv_offsets=_compute_offsets(recv),
        recv_heads=np.array(recv_heads, dtype=np.int64),
        heads=counts.pop(),
        slots=np.where(between, fresh, 0),
        most=int(np.where(between | np.eye(len(members), dtype=bool), fresh, 0).sum(axis=1).max()),
        place=place,
    )


def _map_slots(move: KvMove, own: HeadSlice, kept: np.ndarray, of_plan: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slot of the new pool view for each slot of the plan; and which of this rank's own tokens stay where they are.

    Both views lie over the same bytes.  With ``k`` times fewer heads, slot ``s`` becomes ``k`` slots from ``k * s`` on,
    one of which is what the rank keeps: so all its own tokens stay.  With ``k`` times more heads it is the other way
    round, and those stay that happen to lie in the right part of the larger slot.  The others take the lowest free
    slots.

    Slots are a rank's own business: of one token, the ranks of a group may have different ones.

    ``kept``, ``of_plan``: old slots of the tokens that it has and keeps, and their slots in the plan.
    """
    old_heads, new_heads = (
        compute_kv_head_range(move.kv_heads, layout, move.rank)[1] for layout in (move.old, move.new)
    )
    if old_heads >= new_heads:
        k, part = old_heads // new_heads, own.src_head // new_heads
        slots, stays = kept * k + part, np.ones(len(kept), dtype=bool)
    else:
        k, part = new_heads // old_heads, own.dst_head // old_heads
        slots, stays = kept // k, (kept % k == part) & (kept >= k)  # not in slot 0, SGLang's padding slot
    total = move.plans[move.new.group_of(move.rank)].total
    place = np.zeros(total + 1, dtype=np.int64)
    place[of_plan[stays]] = slots[stays]
    free = np.ones(total + 1, dtype=bool)
    free[0] = False
    free[slots[stays & (slots <= total)]] = False
    others = np.flatnonzero(place[1:] == 0) + 1
    place[others] = np.flatnonzero(free)[: len(others)]
    return place, stays


def _compute_offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0] + [len(part) for part in parts]).astype(np.int64)
