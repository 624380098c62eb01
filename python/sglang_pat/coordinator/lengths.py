"""How long responses get: learnt from the lengths seen in this run.

The survival curve is Kaplan-Meier's in discrete time with a prior on the hazard of each bin (a beta process, Hjort
1990):

    hazard_b = (c · prior_b + ended_b) / (c + at_risk_b)

so that data rules where there are data, and beyond the longest response seen the prior's hazard does.  A request that
still runs is censored at its present length: it counts as at risk up to there, and as ended nowhere.  Responses to one
prompt (a *family*) resemble each other: each family has a factor on the hazard, gamma distributed with mean 1 and
variance ``theta`` (a shared frailty), whose posterior is learnt from the family's other responses.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import log_ndtr, ndtri

PRIOR_MEDIAN = 0.125
"""Median response of the prior, as a share of the limit: the shapes of long-tail RL lie between 1/4 and 1/30."""

PRIOR_SIGMA = 1.0
"""Of the prior's lognormal."""

PRIOR_STRENGTH = 2.0
"""``c``: what the prior weighs in each bin, in responses at risk."""

WINDOW = 4096
"""Responses remembered: some tens of rounds' worth, since lengths drift as training goes on."""

REFRESH = 64
"""``theta`` is estimated anew after this many responses."""

MIN_FAMILIES = 8
"""Complete families that an estimate of ``theta`` needs; it is 0 before: a correlation of fewer says little."""

MAX_THETA = 8.0
"""Beyond Kendall's tau of 0.8 the estimate is noise, and the curve's transform overflows."""

EDGES = np.unique(np.round(2.0 ** np.arange(0, 22.001, 0.125)).astype(np.int64))
"""Ends of the bins in tokens: bin b holds lengths in (EDGES[b-1], EDGES[b]], the first one those of 0 and 1; ratio
1.09, up to 4 million tokens.  Longer responses count as that long."""

_STARTS = np.concatenate([[0], EDGES[:-1]])
_KNOTS = np.concatenate([[0], EDGES]).astype(float)


@dataclass(frozen=True)
class Lognormal:
    """A prior for response lengths: log(length) is normal with ``mu``, ``sigma``; length in tokens."""

    mu: float
    sigma: float

    def hazard(self) -> np.ndarray:
        """Probability of ending in each bin, having reached it; ``[bins]``."""
        return _lognormal_hazard(self.mu, self.sigma)


@lru_cache(maxsize=64)
def _lognormal_hazard(mu: float, sigma: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        log_survival = log_ndtr((mu - np.log(_KNOTS)) / sigma)
    hazard = -np.expm1(np.diff(log_survival))
    hazard.setflags(write=False)
    return hazard


@dataclass(frozen=True)
class Curve:
    """Cumulative hazard of a family's response with factor 1; ``theta`` is the variance of the factor.

    ``knots`` tokens, ``values`` cumulative hazard there, float64 ``[bins + 1]``; linear in between.
    """

    knots: np.ndarray
    values: np.ndarray
    theta: float

    def cumulative(self, tokens: np.ndarray) -> np.ndarray:
        return np.interp(tokens, self.knots, self.values)

    def survival(self, tokens: np.ndarray) -> np.ndarray:
        """P(length > tokens) of a response of which nothing is known; the shape of ``tokens``."""
        hazard = self.cumulative(np.asarray(tokens, dtype=float))
        if self.theta == 0:
            return np.exp(-hazard)
        return (1 + self.theta * hazard) ** (-1 / self.theta)


class LengthHistory:
    """Lengths of finished responses, the newest ``window`` of them.

    Args:
        prior: None for a lognormal scaled to the limit of the running requests (``PRIOR_MEDIAN``, ``PRIOR_SIGMA``).
        window: responses remembered.
        strength: weight of the prior in each bin, in responses.

    Raises:
        ValueError: ``window`` or ``strength`` is not positive.
    """

    def __init__(
        self, *, prior: Lognormal | None = None, window: int = WINDOW, strength: float = PRIOR_STRENGTH
    ) -> None:
        if window < 1 or strength <= 0:
            raise ValueError(f"window {window}, strength {strength}: both must be positive")
        self.prior, self.window, self.strength = prior, window, strength
        self.theta = 0.0
        self._responses: deque[tuple[int, int, bool]] = deque()
        self._families: dict[int, list[tuple[int, bool]]] = {}
        self._ended = np.zeros(len(EDGES))
        self._at_risk = np.zeros(len(EDGES))
        self._observed = 0

    def __len__(self) -> int:
        return len(self._responses)

    def observe(self, length: int, family: int, finished: bool = True) -> None:
        """A response left the engine with ``length`` tokens; not ``finished``: it would have gone on (aborted)."""
        self._responses.append((int(length), int(family), bool(finished)))
        self._families.setdefault(int(family), []).append((int(length), bool(finished)))
        self._count(length, finished, 1)
        if len(self._responses) > self.window:
            length, family, finished = self._responses.popleft()
            self._count(length, finished, -1)
            self._families[family].pop(0)
            if not self._families[family]:
                del self._families[family]
        self._observed += 1
        if self._observed % REFRESH == 0:
            self.theta = self._estimate_theta()

    def _count(self, length: int, finished: bool, sign: int) -> None:
        at_risk = _exposure(np.array([length]), np.array([finished]))
        self._at_risk += sign * at_risk
        if finished:
            self._ended[min(np.searchsorted(EDGES, length), len(EDGES) - 1)] += sign

    def curve(self, limit: int, running: np.ndarray = ()) -> Curve:
        """The curve of response lengths.

        Args:
            limit: most tokens of a response; scales the prior.
            running: present lengths of the requests that still run, ``[requests]``; they are censored there.
        """
        prior = self.prior or Lognormal(float(np.log(max(limit, 2) * PRIOR_MEDIAN)), PRIOR_SIGMA)
        at_risk = self._at_risk
        if len(running):
            lengths, counts = np.unique(running, return_counts=True)
            at_risk = at_risk + _exposure(lengths, np.zeros(len(lengths), dtype=bool), counts)
        hazard = (self.strength * prior.hazard() + self._ended) / (self.strength + at_risk)
        steps = -np.log1p(-np.minimum(hazard, 1 - 1e-9))
        values = np.concatenate([[0.0], np.cumsum(steps)])
        if self.theta > 0:
            # The counts give the hazard of the mixture of families: P(length > t) = (1 + θ H)^(-1/θ).
            values = np.expm1(np.minimum(self.theta * values, 600.0)) / self.theta
        return Curve(_KNOTS, values, self.theta)

    def posterior(self, curve: Curve, family: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gamma posterior of the hazard factor of each running request's family: shape and rate, ``[requests]``.

        shape = 1/θ + responses of the family that ended, rate = 1/θ + cumulative hazards that its responses, finished
        and running, have lived through.  Its mean is the factor; 1 and 1 when θ = 0 (the factor is then certain).
        """
        if curve.theta == 0:
            return np.ones(len(family)), np.ones(len(family))
        families, index = np.unique(family, return_inverse=True)
        known = [self._families.get(int(name), ()) for name in families]
        ended = np.array([sum(finished for _, finished in members) for members in known], dtype=float)
        owner = np.repeat(np.arange(len(families)), [len(members) for members in known])
        lengths = np.array([length for members in known for length, _ in members], dtype=float)
        lived = np.bincount(index, curve.cumulative(output), len(families))
        if len(lengths):
            lived += np.bincount(owner, curve.cumulative(lengths), len(families))
        return (1 / curve.theta + ended)[index], (1 / curve.theta + lived)[index]

    def _estimate_theta(self) -> float:
        """Variance of the family factor, from the correlation of normal scores within complete families.

        The correlation gives Kendall's tau = 2/π asin(correlation), and tau = θ / (θ + 2) for a gamma frailty.
        Complete are families of the largest size that MIN_FAMILIES have: while a batch drains, of the others only the
        short responses are in, which would pass for likeness.
        """
        counts = Counter(len(members) for members in self._families.values())
        size = max((size for size, count in counts.items() if count >= MIN_FAMILIES), default=1)
        if size == 1:
            return 0.0
        complete = [members for members in self._families.values() if len(members) == size]
        lengths = np.array([[length for length, _ in members] for members in complete], dtype=float)
        _, index, ties = np.unique(lengths, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(ties) - ties / 2)[index]  # less one half; equal lengths share theirs
        scores = ndtri(ranks / lengths.size).reshape(lengths.shape)
        variance = np.mean(scores**2)
        if variance == 0:
            return 0.0
        pairs = (scores.sum(axis=1) ** 2 - (scores**2).sum(axis=1)).mean() / (size * (size - 1))
        tau = 2 / np.pi * np.arcsin(np.clip(pairs / variance, 0.0, 1.0))
        # One standard error of chance correlation is not taken for likeness.
        noise = 1 / np.sqrt(len(complete) * size * (size - 1) / 2)
        return 0.0 if tau < noise else float(min(2 * tau / max(1 - tau, 1e-9), MAX_THETA))

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which :meth:`from_dict` makes an equal history."""
        return {
            "prior": None if self.prior is None else [self.prior.mu, self.prior.sigma],
            "window": self.window,
            "strength": self.strength,
            "theta": self.theta,
            "observed": self._observed,
            "responses": [list(response) for response in self._responses],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LengthHistory:
        prior = None if values["prior"] is None else Lognormal(*values["prior"])
        history = cls(prior=prior, window=values["window"], strength=values["strength"])
        for length, family, finished in values["responses"]:
            history.observe(length, family, finished)
        history.theta, history._observed = values["theta"], values["observed"]
        return history


def _exposure(lengths: np.ndarray, ended: np.ndarray, counts: np.ndarray = 1) -> np.ndarray:
    """Responses at risk in each bin, ``[bins]``: whole bins lived through and the bin of an end count 1, the bin in
    which one was censored counts the share that it lived through."""
    share = np.clip((lengths[:, None] - _STARTS) / (EDGES - _STARTS), 0.0, 1.0)
    share = np.round(share * 1024) / 1024  # sums of these are exact: adding and removing leaves no residue
    share = np.where(ended[:, None] & (share > 0), 1.0, share)
    share[ended & (lengths <= 0), 0] = 1.0  # an empty response ends in the first bin
    return (share * np.reshape(counts, (-1, 1))).sum(axis=0)
