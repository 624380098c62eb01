"""Weight shards as intervals of the full tensor.

A shard of a parameter at (degree, TP rank) is a list of half-open intervals along one
dimension of the unsharded tensor, laid out one after the other.  Going from one shard to
another is then plain interval arithmetic, whatever the layer: a QKV projection has three
intervals (KV heads shared by several ranks when the degree exceeds their number), a merged
gate/up projection two, a row-parallel one an interval of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_pat.errors import Unsupported

Interval = tuple[int, int]
"""``(start, length)`` in the full tensor, in elements along the sharded dimension."""


class ShardError(Unsupported):
    """A model cannot cross a switch because of how one of its parameters is sharded."""

    def __init__(self, parameter: str, tp: int, why: str, advice: str = "this model is not supported") -> None:
        super().__init__(f"--adaptive-tp, {parameter} at tp={tp}: {why}: {advice}")


@dataclass(frozen=True)
class Block:
    """One independently sharded block of a parameter.

    Attributes:
        size: length along the sharded dimension of the whole block.
        units: indivisible pieces (attention heads); with more ranks than units, neighbouring
            ranks share one.  ``None``: any divisor of ``size``.
    """

    size: int
    units: int | None = None

    def get_shard(self, tp: int, tp_rank: int) -> Interval:
        """The part of TP rank ``tp_rank`` at degree ``tp`` (start relative to the block)."""
        parts = tp if self.units is None else min(tp, self.units)
        if self.size % parts or tp % parts or (self.units or parts) % parts:
            raise ValueError(f"a block of {self.size} in {self.units or self.size} units does not divide over tp={tp}")
        length = self.size // parts
        return (tp_rank * parts // tp) * length, length


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of a parameter: ``dim`` is the sharded dimension, None if every rank has it whole."""

    dim: int | None
    blocks: tuple[Block, ...] = ()

    def list_intervals(self, tp: int, tp_rank: int) -> list[Interval]:
        """Intervals that TP rank ``tp_rank`` of degree ``tp`` holds, in storage order."""
        result: list[Interval] = []
        origin = 0
        for block in self.blocks:
            start, length = block.get_shard(tp, tp_rank)
            result.append((origin + start, length))
            origin += block.size
        return result


WHOLE = ShardSpec(dim=None)


@dataclass(frozen=True)
class Copy:
    """A copy of ``length`` elements along the sharded dimension, from source to destination offset."""

    src: int
    dst: int
    length: int


def list_copies(source: Sequence[Interval], target: Sequence[Interval]) -> list[Copy]:
    """Copies that build shard ``target`` from what shard ``source`` holds of it.

    Adjacent copies are merged, so a target that is one contiguous piece of the source comes
    back as a single :class:`Copy` and can be a view.
    """
    result: list[Copy] = []
    dst = 0
    for start, length in target:
        src = 0
        for held_start, held_length in source:
            low, high = max(start, held_start), min(start + length, held_start + held_length)
            if low < high:
                piece = Copy(src + low - held_start, dst + low - start, high - low)
                last = result[-1] if result else None
                if last and last.src + last.length == piece.src and last.dst + last.length == piece.dst:
                    result[-1] = Copy(last.src, last.dst, last.length + piece.length)
                else:
                    result.append(piece)
            src += held_length
        dst += length
    return result
