"""Response lengths to simulate: named shapes, formulas, files; correlated within groups of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from scipy.special import ndtr, ndtri

from sglang_pat import files
from sglang_pat.rollout.records import SampleId

NAMED = {
    "deepscaler": "lognormal:7.919,0.885,24576",
    "rollpacker": "body-atom:6.363,0.70,16384,0.01",
    "sft": "lognormal:6.522,1.684,61565",
    "partial-rollout": "lognormal:9.409,1.0,163840",
}
"""Shapes reported by others.  deepscaler: PAT's Llama-3.1-8B (10.85% above 8K, 2.18% above 16K).  rollpacker: Fig. 2,
median 580, P75 930, 1% at the cap of 16K (max 28 times the median).  sft: slime #1450, median 680, mean 2,806, max
61,565.  partial-rollout: verl, 97% below 80K, max 160K (sigma 1 is our guess)."""

LONGEST = 1 << 22
"""Tokens of a response; policies tell no longer ones apart."""

Length = Annotated[int, msgspec.Meta(ge=1, le=LONGEST)]
"""Tokens of a response."""


@dataclass(frozen=True)
class Shape:
    """A distribution of response lengths in tokens, as its inverse distribution function.

    Attributes:
        limit: most tokens of a response; longer ones are cut to it.
        atom: probability of a response that only the limit ends.
        mu, sigma: of the lognormal body; unused if there are ``samples``.
        samples: lengths of a file, ascending, or None.
    """

    name: str
    limit: int
    mu: float = 0.0
    sigma: float = 0.0
    atom: float = 0.0
    samples: np.ndarray | None = None

    def quantile(self, share: np.ndarray) -> np.ndarray:
        """Lengths, int64, of the shape of ``share`` (in [0, 1))."""
        if self.samples is not None:
            index = np.minimum((share * len(self.samples)).astype(int), len(self.samples) - 1)
            return np.clip(self.samples[index], 1, self.limit)
        with np.errstate(over="ignore", divide="ignore"):
            body = np.exp(self.mu + self.sigma * ndtri(np.minimum(share / (1 - self.atom), 1.0)))
        capped = np.where(share >= 1 - self.atom, self.limit, np.minimum(body, self.limit))
        return np.maximum(np.round(capped), 1).astype(np.int64)

    def draw(self, batch: int, correlation: float, group: int, random: np.random.Generator) -> np.ndarray:
        """Lengths of ``batch`` responses, ``[batch]``: neighbours in groups of ``group`` are responses to one prompt.

        ``correlation``: of the normal scores within a group (a Gaussian copula).
        """
        groups = -(-batch // group)
        common = np.repeat(random.normal(size=groups), group)[:batch]
        return self.sample_correlated_lengths(common, random.normal(size=batch), correlation)

    def sample_correlated_lengths(self, common: np.ndarray, own: np.ndarray, correlation: float) -> np.ndarray:
        """Lengths for normal scores: those of the prompts, ``common``, and those of the responses, ``own``."""
        return self.quantile(ndtr(np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own))

    def sample_length(self, seed: int, sample: SampleId, correlation: float) -> int:
        """Length of a response: the same for the same seed; another attempt is another draw for the same prompt."""
        own = np.random.default_rng((seed, 1, sample.index, sample.number, sample.attempt)).normal()
        common = np.random.default_rng((seed, 2, sample.index)).normal()
        return int(self.sample_correlated_lengths(np.asarray(common), np.asarray(own), correlation))


def parse_shape(text: str, limit: int | None = None) -> Shape:
    """A name (``NAMED``), ``lognormal:mu,sigma,cap``, ``body-atom:mu,sigma,cap,probability``, or a file of lengths.

    Args:
        limit: most tokens; None for the shape's own cap, or a file's longest response.

    Raises:
        ValueError: one line with what was given and what is allowed.
    """
    kind, _, rest = NAMED.get(text, text).partition(":")
    if kind in ("lognormal", "body-atom") and rest:
        names = ["mu", "sigma", "cap", "probability"][: 3 if kind == "lognormal" else 4]
        try:
            values = [float(part) for part in rest.split(",")]
        except ValueError:
            values = []
        if len(values) != len(names) or not np.isfinite(values).all():
            raise ValueError(f"--lengths {text}: give {kind}:{','.join(names)} as numbers")
        mu, sigma, cap, atom = (*values, 0.0)[:4]
        if sigma < 0 or not 1 <= cap <= LONGEST or not 0 <= atom < 1:
            allowed = f"sigma >= 0, cap from 1 to {LONGEST} and 0 <= probability < 1 are needed"
            raise ValueError(f"--lengths {text}: {allowed}")
        return Shape(text, limit or int(cap), mu, sigma, atom)
    samples = np.sort(read_lengths(Path(text)))
    return Shape(Path(text).name, limit or int(samples[-1]), samples=samples)


def read_lengths(path: Path) -> np.ndarray:
    """Lengths of a file, a JSON array or numbers between spaces; int64.

    Raises:
        ValueError: one line that names the file, and which of them is wrong.
    """
    try:
        data = files.read(path)
        array = data if data.lstrip().startswith(b"[") else b"[" + b",".join(data.split()) + b"]"
        lengths = files.decode(array, list[Length])
        if not lengths:
            raise ValueError("no lengths in it")
    except ValueError as error:
        allowed = f"give a file, one of {', '.join(NAMED)}, lognormal:… or body-atom:…"
        raise ValueError(f"--lengths {path}: {error}; {allowed}") from None
    return np.array(lengths, dtype=np.int64)
