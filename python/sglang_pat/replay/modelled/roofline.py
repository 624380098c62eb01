"""Step and prefill times from bytes, operations and bandwidths: for machines that are not here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_pat.predict.predictor import Number

ELEMENT = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A dense decoder with grouped-query attention and a gated MLP; sizes from the published configuration."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        """Of all layers, norms left out (less than 0.01%)."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weight_bytes(self) -> int:
        """All weights; input and output embedding are separate in the models used here."""
        return ELEMENT * (self.layer_parameters + 2 * self.vocabulary * self.hidden)

    @property
    def read_bytes(self) -> int:
        """Weights read in a decode step: all but the input embedding."""
        return ELEMENT * (self.layer_parameters + self.vocabulary * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Of one token, all layers and heads."""
        return ELEMENT * 2 * self.layers * self.kv_heads * self.head_dim

    def describe(self) -> str:
        return (
            f"{self.architecture} L{self.layers} H{self.hidden} heads{self.heads}/{self.kv_heads} "
            f"I{self.intermediate} V{self.vocabulary}"
        )


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Times of one model on one machine.

    Attributes:
        read_rate: bytes a second that a GPU gets from its memory in a step.
        flops: peak bf16 operations a second of a GPU; ``prefill_share`` of it is reached in prefill.
        reduce_rate: bytes a second of a ring all-reduce, each byte counted 2(tp-1)/tp times.
        hop_seconds: latency of one of the 2(tp-1) hops of a ring; 0 where an all-reduce takes one hop.
        layer_seconds: fixed time of a layer in every step (launches, scheduler, one-hop latencies).
    """

    model: ModelSize
    read_rate: float
    flops: float
    prefill_share: float
    reduce_rate: float
    hop_seconds: float
    layer_seconds: float

    def step_seconds(self, tp: int, batch: Number, tokens: Number) -> Number:
        """Decode step of a replica with ``batch`` requests of ``tokens`` context tokens together."""
        weights = self.model.read_bytes / (tp * self.read_rate)
        compute = self.model.read_bytes / ELEMENT * 2 * batch / (tp * self.flops)
        kv = self.model.kv_bytes * tokens / (tp * self.read_rate)
        return np.maximum(weights, compute) + kv + self._fixed(tp) + self._reduce(tp, batch)

    def prefill_seconds(self, tp: int, batch: Number, length: Number) -> Number:
        """Prefill of ``batch`` requests of ``length`` tokens on a replica."""
        weights = self.model.read_bytes / (tp * self.read_rate)
        compute = prefill_operations(self.model, batch, length) / (tp * self.flops * self.prefill_share)
        return np.maximum(weights, compute) + self._fixed(tp) + self._reduce(tp, batch * length)

    def generation_seconds(self, tp: int, lengths: np.ndarray, replicas: int) -> float:
        """A batch of ``lengths`` output tokens in one static layout; prompts left out.

        The longest request's replica decides; requests are dealt out in order of length.
        """
        mine = np.sort(lengths)[::-1][::replicas]
        step = np.arange(int(mine[0]))
        live = len(mine) - np.searchsorted(mine[::-1], step, side="right")
        return float(np.sum(self.step_seconds(tp, live, live * step)))

    def _fixed(self, tp: int) -> float:
        return self.model.layers * (self.layer_seconds + 2 * 2 * (tp - 1) * self.hop_seconds)

    def _reduce(self, tp: int, tokens: Number) -> Number:
        return reduced_bytes(self.model, tp, tokens) / self.reduce_rate


def reduced_bytes(model: ModelSize, tp: int, tokens: Number) -> Number:
    """Bytes through a GPU's link for the two all-reduces of every layer over ``tokens`` hidden states."""
    return 2 * model.layers * ELEMENT * model.hidden * tokens * 2 * (tp - 1) / tp


def prefill_operations(model: ModelSize, batch: Number, length: Number) -> Number:
    """Matrix products of all layers and causal attention; the output embedding of one position is left out."""
    attention = 2 * 2 * model.layers * model.heads * model.head_dim * length / 2
    return batch * length * (2 * model.layer_parameters + attention)
