"""Batches: a model, a link between the ranks, and how long the responses are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scipy.special import ndtri

from sglang_pat.testing import models
from sglang_pat.tools.prompts import PROMPTS

NATURAL = "none"
"""The link as it is: shared memory."""


@dataclass(frozen=True)
class LognormalBatch:
    """A batch with response lengths, in tokens, that are spread like those of a real one.

    Lognormal with this median and sigma, at least ``least``; a share ``capped`` of them runs into the ``limit``.
    """

    batch: int
    median: float
    sigma: float
    limit: int
    capped: float = 0.0
    least: int = 4

    def compute_lengths(self) -> list[int]:
        """Quantiles of the distribution, ascending: the same work in every round."""
        long = round(self.batch * self.capped)
        short = self.batch - long
        drawn = [self.median * math.exp(self.sigma * ndtri((i + 0.5) / short)) for i in range(short)]
        return [int(min(max(length, self.least), self.limit)) for length in drawn] + [self.limit] * long

    def make_requests(self, round_number: int, tokens: int | None = None) -> list[dict]:
        """The requests of one round, for ``/generate``.

        No prompt comes twice.  Policies are told one limit for all responses, not the lengths.

        Args:
            tokens: length of all responses, for a round that does not count; its limit, too, so that policies learn no
                length from it.
        """
        rng = random.Random(round_number)
        lengths, limit = self.compute_lengths(), self.limit
        rng.shuffle(lengths)
        if tokens is not None:
            lengths, limit = [tokens] * len(lengths), tokens
        return [
            {
                "text": f"Question {round_number}.{i}: {rng.choice(PROMPTS)}\nAnswer:",
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": length,
                    "ignore_eos": True,
                    "custom_params": {"pat_limit": limit},
                },
            }
            for i, length in enumerate(lengths)
        ]


@dataclass(frozen=True)
class DemoCase:
    """A model, an emulated link (µs:GB/s) or :data:`NATURAL`, and the work."""

    model: str
    link: str
    work: LognormalBatch

    @property
    def link_name(self) -> str:
        if self.link == NATURAL:
            return "real link"
        latency, bandwidth = self.link.split(":")
        return f"emulated link of {latency} µs, {bandwidth} GB/s"


MODELS = Path(".cache") / "models"
SMOLLM2, WIDE, TINY = "SmolLM2-135M", "wide", "tiny"


WIDE_SHAPE = dict(layers=2, hidden=2048, intermediate=10240, heads=16, kv_heads=4, head_dim=128, vocab=2048)
"""147 million parameters in two layers: steps are mostly weights, as those of a model of billions are."""
MAKERS: dict[str, Callable[[], Path]] = {
    SMOLLM2: lambda: models.make_smollm2(MODELS / "smollm2"),
    WIDE: lambda: models.make_random("llama", MODELS / "wide", **WIDE_SHAPE),
    TINY: lambda: models.make_random("llama", MODELS / "llama"),
}
"""Makers of models by name; each returns the folder of its model, made on first use."""

BANDWIDTH = "5:0.03"
"""A link with which tp2 over tp1 is, of ``wide`` at batch 128, what TP8 over TP2 is of 8×A40 in the paper (1.26)."""

CASE = DemoCase(WIDE, BANDWIDTH, LognormalBatch(64, 24, 1.0, 320))
"""The case of the demonstration.  Its link is emulated: over shared memory these two ranks are as fast in one layout
all along."""
QUICK = {"quick": DemoCase(TINY, NATURAL, LognormalBatch(16, 24, 1.0, 200))}
