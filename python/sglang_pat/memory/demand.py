"""What an engine asks for, and the memory that there is."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pat.layout import ParallelLayout
from sglang_pat.memory.shapes import ModelShape

MIB, GIB = 1 << 20, 1 << 30

MOST_SAMPLED = 256
"""Requests whose logits a step is expected to hold at once."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Memory to plan with."""

    kind: str
    """``cpu`` or ``cuda``."""
    free: int
    """Bytes that can be taken: on the GPU that has least, or on the whole machine."""
    total: int
    """Bytes of that GPU or of the machine."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """An engine to be started."""

    shape: ModelShape
    base: ParallelLayout
    degrees: tuple[int, ...]
    """TP degrees of all layouts, lowest (the base) first."""
    prefill_tokens: int
    """Most tokens of a prefill step (``--chunked-prefill-size``)."""
    graph_batch: int = 0
    """Largest batch with a CUDA graph; 0 without graphs."""
    tail_graph_batch: int = 0
    """The same of the layouts above the base."""
    max_running: int | None = None
    tokens: int | None = None
    """``--max-total-tokens``, if given: KV tokens of a replica of the base layout."""
    fraction: float | None = None
    """``--mem-fraction-static``, if given: weights and KV of all ranks, as a part of what is free."""
    tail_weights: int = 0
    """Bytes of a rank for weights of layouts above the base that are not views of its base shard."""
    gathers: bool = False
    """A switch brings all KV of a group to each of its ranks (``--pat-kv-exchange allgather``)."""

    def request_table(self, tokens: int) -> int:
        """Bytes of SGLang's table of token places with a pool of so many tokens."""
        rows = max(min(tokens * 512 // self.shape.context, 4096), 2048)
        rows = min(rows, tokens // 2 if self.max_running is None else self.max_running)
        return (rows + 1) * (self.shape.context + 4) * 4

    def activations(self) -> int:
        """Bytes of the largest step."""
        shape, tp = self.shape, self.base.tp
        wide = 8 * shape.hidden + 3 * shape.intermediate // tp + 2 * shape.heads // tp * shape.head_dim
        logits = min(self.max_running or MOST_SAMPLED, MOST_SAMPLED) * shape.vocab * 4 * 4
        return self.prefill_tokens * wide * shape.item + logits

    def buffers(self, kind: str) -> float:
        """Bytes that KV goes through in a switch, for each byte of the pool."""
        low, high = self.degrees[0], self.degrees[-1]
        if high == low:
            return 0.0
        local = self.shape.local_kv_heads
        # With more ranks than KV heads a head goes to several.
        copies = high // low if self.gathers else high // low * local(high) / local(low)
        return (2 if kind == "cpu" else 3) * max(1.0, copies) / self.shape.layers


def size_text(size: int) -> str:
    """For a reader."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
