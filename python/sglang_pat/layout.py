"""Parallel layouts of one node (:class:`ParallelLayout`): which ranks form which tensor-parallel group.

Groups are *strided*: with ``N`` ranks and degree ``t``, group ``g`` is
``{g, g + N/t, g + 2N/t, ...}``, so rank ``r`` has TP rank ``r // (N/t)``.  For
``t < t'`` the weight shard of a rank at ``t'`` then lies inside its shard at ``t``
(``floor(r t'/N)/t'`` refines ``floor(r t/N)/t``), and raising the degree moves no
weights.  PAT (section 4.3) uses contiguous groups, where shards do not nest.

Ranks are *lent* with a stride: of every ``s`` neighbours the first goes on working.  The ranks that ``s`` divides form
whole TP groups in every layout whose number of groups it divides, so no group is ever split, and what works has a
smaller world of strided groups that exist already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True)
class ParallelLayout:
    """``tp * dp`` ranks as ``dp`` TP groups of degree ``tp``.

    ``stride``: every so many of the groups is a replica, which works; the others are lent.
    """

    tp: int
    dp: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dp < 1:
            raise ValueError(f"layout tp={self.tp}, dp={self.dp}: both must be at least 1")
        if self.stride < 1 or self.dp % self.stride:
            raise ValueError(f"stride {self.stride}: must divide the {self.dp} groups of tp={self.tp}")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp

    @property
    def leaders(self) -> range:
        """Lowest rank of every TP group, working or lent; also the group's number."""
        return range(self.dp)

    @property
    def working(self) -> range:
        """Leaders whose groups work."""
        return range(0, self.dp, self.stride)

    @property
    def lent(self) -> list[int]:
        """Ranks that are lent."""
        return [rank for rank in range(self.num_ranks) if rank % self.stride]

    def tp_rank(self, rank: int) -> int:
        return rank // self.dp

    def group_of(self, rank: int) -> int:
        return rank % self.dp

    def get_working_group(self, rank: int) -> int:
        """The group of ``rank`` if it works, else the one that took its requests over."""
        group = self.group_of(rank)
        return group - group % self.stride

    def group(self, index: int) -> list[int]:
        """Ranks of TP group ``index``, in TP-rank order."""
        return list(range(index, self.num_ranks, self.dp))

    def groups(self) -> list[list[int]]:
        return [self.group(index) for index in range(self.dp)]

    def with_tp(self, tp: int) -> ParallelLayout:
        """The layout of degree ``tp`` over the same ranks, with the same ones lent."""
        if tp < 1 or self.num_ranks % tp:
            raise ValueError(f"tp={tp} does not divide the {self.num_ranks} ranks")
        return ParallelLayout(tp, self.num_ranks // tp, self.stride)

    def with_stride(self, stride: int) -> ParallelLayout:
        """The layout of the same degree in which every ``stride``-th group works."""
        return ParallelLayout(self.tp, self.dp, stride)

    def as_dict(self) -> dict[str, int]:
        """The layout's fields; ``stride`` only where ranks are lent."""
        return asdict(self) if self.stride > 1 else {"tp": self.tp, "dp": self.dp}

    def __str__(self) -> str:
        return f"tp{self.tp}×dp{self.dp}" + (f", every {self.stride} groups one works" if self.stride > 1 else "")


def list_candidate_layouts(base: ParallelLayout, degrees: list[int] | None = None) -> list[ParallelLayout]:
    """Layouts the engine may run in, sorted by degree; the base layout is first.

    ``degrees`` defaults to every doubling of the base degree up to ``N``.

    Raises:
        ValueError: a degree is below 1 or the base degree, does not divide the ranks, or
            does not continue the chain of divisors (each must divide the next, or
            shards would not nest).
    """
    ranks = base.num_ranks
    if degrees is None:
        degrees = [base.tp]
        while ranks % (degrees[-1] * 2) == 0:
            degrees.append(degrees[-1] * 2)
    chain = sorted({base.tp, *degrees})
    for tp in chain:
        if tp < 1:
            raise ValueError(f"candidate tp={tp}: a degree is at least 1 (the base layout has tp={base.tp})")
        if tp < base.tp:
            raise ValueError(
                f"candidate tp={tp} is below the base tp={base.tp}: the base layout is the lowest degree; "
                f"start with --tp {tp} instead"
            )
        if ranks % tp:
            raise ValueError(f"candidate tp={tp} does not divide the {ranks} ranks (tp × dp of the base layout)")
    for low, high in pairwise(chain):
        if high % low:
            raise ValueError(f"candidates {chain}: {low} does not divide {high}, so their shards do not nest")
    return [base.with_tp(tp) for tp in chain]


def choose_default_degrees(degrees: Sequence[int], only_ends: bool) -> tuple[int, ...]:
    """Degrees that are used among ``degrees`` (ascending): each has groups, graphs and buffers, which take memory.

    Args:
        only_ends: whoever decides goes from the lowest to the highest only.
    """
    return tuple(degrees[:1]) + tuple(degrees[1:][-1:] if only_ends else degrees[1:])


def list_strides(layouts: Sequence[ParallelLayout]) -> list[int]:
    """Strides with which ranks can be lent, where ``layouts`` (ascending) are the candidates.

    ``s`` neighbours exchange KV when ranks are lent with stride ``s``, in the same groups as between the degrees N / s
    and N: both must be candidates.
    """
    *lower, highest = layouts
    return [layout.dp for layout in reversed(lower)] if highest.dp == 1 else []


def list_destinations(old: ParallelLayout, new: ParallelLayout, group: int) -> range:
    """Groups of layout ``new`` that requests of group ``group`` of ``old`` may go to.

    When ranks are lent, their requests go to the working rank before them, and when they are taken back, they get some
    of that one's.
    """
    assert old.tp == new.tp or old.stride == new.stride, f"from {old} to {new} in one switch"
    if new.stride < old.stride:
        return range(group, group + old.stride, new.stride) if group in old.working else range(0)
    if new.tp < old.tp:
        return range(group, new.dp, old.dp)
    to = new.get_working_group(group)
    return range(to, to + 1)


def needs_capsules(old: ParallelLayout, new: ParallelLayout) -> bool:
    """Whether requests go to ranks that do not hold them: not where a group is split, all of whose ranks do."""
    return new.tp > old.tp or new.stride != old.stride


def get_exchange_degrees(a: ParallelLayout, b: ParallelLayout) -> tuple[int, int]:
    """The lower and the higher of two degrees between which a switch has the same exchange groups as between ``a`` and
    ``b``."""
    if a.stride == b.stride:
        return min(a.tp, b.tp), max(a.tp, b.tp)
    return a.num_ranks // max(a.stride, b.stride), a.num_ranks


def exchange_groups(a: ParallelLayout, b: ParallelLayout) -> list[list[int]]:
    """Groups of ranks among which a switch between ``a`` and ``b`` moves KV.

    Only ranks that hold the same shard at the lower degree and end in the same group at
    the higher one have anything to exchange: ``max(tp)/min(tp)`` ranks each.  If ranks are lent or taken back, these
    are a working rank and those after it that are lent.
    """
    whole = a.with_stride(1)
    low, high = map(whole.with_tp, get_exchange_degrees(a, b))
    buckets: dict[tuple[int, int], list[int]] = {}
    for rank in range(low.num_ranks):
        buckets.setdefault((low.tp_rank(rank), high.group_of(rank)), []).append(rank)
    return list(buckets.values())


def get_device_of_rank(rank: int, num_ranks: int) -> int:
    """GPU of ``rank`` if low-degree groups are to be neighbours: bit reversal.

    With 8 ranks the tp=2 groups are GPUs (0,1)(2,3)(4,5)(6,7).  Counts that are not a
    power of two keep the identity.
    """
    if num_ranks & (num_ranks - 1):
        return rank
    bits = num_ranks.bit_length() - 1
    return int(format(rank, f"0{bits}b")[::-1], 2) if bits else 0
