"""Responses to one prompt resemble each other: what finished ones say about those that still run.

The normal score of a length is z = Φ⁻¹(P(response <= length)), with the curve of all responses.  Within a family

    z = √ρ · g + √(1 - ρ) · e,    g, e standard normal, g the same for all of the family,

so that the logarithm of a length has a part that is the prompt's and a part that is chance (for lognormal lengths it is
exactly this).  A gamma frailty, the usual choice, makes families with early ends end early for ever: where lengths
are as above and ρ is 0.8, it expects under a third of the steps that the last 4 take (``studies/alternatives.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
from scipy.special import log_ndtr, ndtri, roots_hermitenorm

MIN_FAMILIES = 8
"""Complete families that an estimate of ρ needs; it is 0 before: a correlation of fewer says little."""

MAX_CORRELATION = 0.95
"""Above it chance would have no part, and one sibling would settle the others."""

_NODES, _WEIGHTS = roots_hermitenorm(11)


Response = tuple[int, bool]
"""Its length, and whether it finished; cut, it would have been longer."""


def estimate_correlation(families: Collection[list[Response]]) -> float:
    """ρ of the normal scores of lengths within families; 0 if it cannot be told from chance.

    Taken from complete families, which are those of the largest size that ``MIN_FAMILIES`` have: while a batch drains,
    of the others only the short responses are in, which would pass for likeness.
    """
    counts = Counter(len(members) for members in families)
    size = max((size for size, count in counts.items() if count >= MIN_FAMILIES), default=1)
    if size == 1:
        return 0.0
    members = np.array([members for members in families if len(members) == size])  # [families, size, 2]
    scores = ndtri(_shares(members[..., 0], members[..., 1].astype(bool)))
    variance = np.mean(scores**2)
    if variance == 0:
        return 0.0
    pairs = size * (size - 1)
    correlation = ((scores.sum(axis=1) ** 2 - (scores**2).sum(axis=1)).mean() / pairs) / variance
    chance = 1 / np.sqrt(len(scores) * pairs / 2)  # standard error if there is no likeness
    return 0.0 if correlation < 2 * chance else float(min(correlation, MAX_CORRELATION))


def _shares(lengths: np.ndarray, finished: np.ndarray) -> np.ndarray:
    """Share of responses that are shorter, the shape of ``lengths``, by the product-limit estimate.

    Equal lengths share the middle of their part, and those cut at a length the middle of all that is above it.
    """
    values, index = np.unique(lengths, return_inverse=True)
    index = index.reshape(lengths.shape)
    ended, left = np.bincount(index[finished], minlength=len(values)), np.bincount(index.ravel())
    at_risk = np.cumsum(left[::-1])[::-1]
    after = np.cumprod(1 - ended / at_risk)
    before = np.concatenate([[1.0], after[:-1]])
    return 1 - np.where(finished, (before + after)[index], after[index]) / 2


def expected_scores(
    correlation: float, known: list[np.ndarray], cut: list[np.ndarray], index: np.ndarray, present: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the normal score of each running request's length, ``[requests]`` each.

    Given the scores of its finished siblings, and that those that were cut and those that run have got to their present
    lengths; not given its own present length, which the caller knows.

    Args:
        known: scores of the finished responses of each family, ``[families]`` of arrays; ``cut``: of those cut there.
        index: family of each running request, int ``[requests]``.
        present: score of each running request's present length, ``[requests]``.
    """
    requests, count = len(index), len(known)
    own = np.sqrt(1 - correlation)
    sums = np.array([scores.sum() for scores in known])
    sizes = np.array([len(scores) for scores in known])
    precision = 1 + sizes * correlation / (1 - correlation)
    mean = np.sqrt(correlation) / (1 - correlation) * sums / precision
    spread = 1 / np.sqrt(precision)
    if requests > len(np.unique(index)) or any(map(len, cut)):
        # Siblings that run or were cut: the family's part is tilted by the chance that they got so far, by quadrature.
        part = mean[:, None] + spread[:, None] * _NODES  # [families, nodes]
        levels, level = np.unique(present, return_inverse=True)
        codes, which, members = np.unique(index * len(levels) + level, return_inverse=True, return_counts=True)
        of, score = codes // len(levels), levels[codes % len(levels)]
        reach = log_ndtr((np.sqrt(correlation) * part[of] - score[:, None]) / own)  # [codes, nodes]
        together = np.zeros((count, len(_NODES)))
        np.add.at(together, of, members[:, None] * reach)
        stopped, where = np.concatenate(cut), np.repeat(np.arange(count), [len(scores) for scores in cut])
        np.add.at(together, where, log_ndtr((np.sqrt(correlation) * part[where] - stopped[:, None]) / own))
        others = together[of] - reach
        weights = _WEIGHTS * np.exp(others - others.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        tilted = (weights * part[of]).sum(axis=1)
        variance = (weights * (part[of] - tilted[:, None]) ** 2).sum(axis=1)
        mean, spread = tilted[which], np.sqrt(variance)[which]
    else:
        mean, spread = mean[index], spread[index]
    return np.sqrt(correlation) * mean, np.sqrt(correlation * spread**2 + 1 - correlation)
