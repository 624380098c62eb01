"""Which layers of a judge stay on the GPU, and how many bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sglang_pat.memory.shapes import ModelShape

PLACES = 2
"""Room on the GPU for streamed layers: one is computed while the next one arrives in the other."""
FEWEST = PLACES + 1
"""Streaming fewer layers than this frees no memory."""
AUTO = "auto"
FLAG = "--stream-layers"


class CannotStream(ValueError):
    """Error of a judge that cannot stream; one line: what was given, and what to change."""


def parse_count(text: str, where: str = FLAG) -> int | None:
    """The number of layers to stream; None for ``auto``.

    Raises:
        CannotStream: neither ``auto`` nor a number of layers that frees memory; with ``where`` it was given.
    """
    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < FEWEST:
        raise CannotStream(
            f"{where} is {text!r}, must be {AUTO} or a number from {FEWEST} on: streamed layers share {PLACES} places "
            "on the GPU, so fewer free nothing"
        )
    return int(text)


def spread_layers(count: int, layers: int) -> tuple[int, ...]:
    """Numbers of the ``count`` layers to stream: evenly spread, so that each is copied while others compute.

    The first one comes as late as possible: nothing else hides its copy.
    """
    return tuple(number for number in range(layers) if (number + 1) * count // layers > number * count // layers)


def order_layers(count: int, layers: int) -> tuple[int, ...]:
    """All layers in the order in which they go to host memory.

    First ``count`` that are evenly spread; then always the one in the middle of the longest run of resident ones.
    """
    order = list(spread_layers(count, layers))
    while len(order) < layers:
        before, after = max(pairwise([-1, *sorted(order), layers]), key=lambda run: run[1] - run[0])
        order.append((before + after) // 2)
    return tuple(order)


def count_saved(streamed: int) -> int:
    """Layers whose room on the GPU is free while ``streamed`` are in host memory."""
    return max(0, streamed - PLACES)


@dataclass(frozen=True, kw_only=True)
class JudgeMemory:
    """Memory that one rank of a judge has, and that it needs."""

    shape: ModelShape
    tp: int
    budget: int
    """Bytes for weights and KV."""
    tokens: int
    """Tokens that KV must have room for, at least those of the longest sequence."""

    def count_weight_bytes(self, streamed: int) -> int:
        """Bytes of weights on the GPU while ``streamed`` layers are in host memory."""
        layer = self.shape.layer_bytes(self.tp)
        return self.shape.weight_bytes(self.tp) - layer * count_saved(streamed)

    @property
    def kv_bytes(self) -> int:
        return self.shape.kv_bytes(self.tp) * self.tokens

    def choose_count(self) -> int:
        """The fewest layers to stream so that the rest and the KV fit; 0 if all layers do.

        Raises:
            CannotStream: not even all layers streamed leave room; one line with what would.
        """
        missing = self.count_weight_bytes(0) + self.kv_bytes - self.budget
        if missing <= 0:
            return 0
        count = PLACES + -(-missing // self.shape.layer_bytes(self.tp))
        if count <= self.shape.layers:
            return count
        room = (self.budget - self.count_weight_bytes(self.shape.layers)) // self.shape.kv_bytes(self.tp)
        raise CannotStream(
            f"{FLAG} {AUTO}: with all {self.shape.layers} layers in host memory there is room for {max(0, room)} "
            f"tokens of KV, and {self.tokens} are needed: give a smaller --context-length or --max-total-tokens, a "
            "larger --mem-fraction-static, or the actor less memory"
        )
