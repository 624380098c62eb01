"""How long responses get (:meth:`LengthHistory.make_curve`): learnt from the lengths seen in this run.

The survival curve is Kaplan-Meier's in discrete time with a prior on the hazard of each bin (a beta process, Hjort
1990):

    hazard_b = (c · prior_b + ended_b) / (c + at_risk_b)

so that data rules where there are data, and beyond the longest response seen the prior's hazard does.  A request that
still runs, or was cut (aborted, or at its limit), is censored at its length: it counts as at risk up to there, and as
ended nowhere.  That responses to one prompt are alike in length is left out: it moves no figure
(``docs/results/policies.md``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

PRIOR_MEDIAN = 0.125
"""Median response of the prior, as a share of the running requests' limit: the shapes of long-tail RL lie between 1/4
and 1/30."""

PRIOR_SIGMA = 1.0
"""Standard deviation of the logarithm of a length in the prior, a lognormal."""

PRIOR_STRENGTH = 2.0
"""``c``: what the prior weighs in each bin, in responses at risk."""

WINDOW = 4096
"""Number of responses remembered: some tens of rounds' worth, since lengths drift as training goes on."""

EDGES = np.unique(np.round(2.0 ** np.arange(0, 22.001, 0.125)).astype(np.int64))
"""Ends of the bins in tokens: bin b holds lengths in (EDGES[b-1], EDGES[b]], the first one those of 0 and 1; ratio
1.09, up to 4 million tokens.  Longer responses count as that long."""

_STARTS = np.concatenate([[0], EDGES[:-1]])
_KNOTS = np.concatenate([[0], EDGES]).astype(float)


@lru_cache(maxsize=64)
def _compute_prior_hazard(mu: float) -> np.ndarray:
    """Probability of ending in each bin, having reached it; ``[bins]``."""
    with np.errstate(divide="ignore"):
        log_survival = log_ndtr((mu - np.log(_KNOTS)) / PRIOR_SIGMA)
    hazard = -np.expm1(np.diff(log_survival))
    hazard.setflags(write=False)
    return hazard


@dataclass(frozen=True)
class Curve:
    """Survival curve of response lengths.

    ``hazards``: cumulative hazard at 0 and at the ends of the bins, float64 ``[bins + 1]``; linear in between.
    """

    hazards: np.ndarray

    def hazard(self, tokens: np.ndarray) -> np.ndarray:
        """Cumulative hazard up to ``tokens``, of the same shape: P(length > a, given length > b) is
        exp(hazard(b) - hazard(a))."""
        return np.interp(tokens, _KNOTS, self.hazards)

    def compute_alive(self, output: np.ndarray, left: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        """Probability that a request of ``output`` tokens, which may have ``left`` more, still runs after ``ahead``
        more, ``[requests, ahead]``."""
        alive = np.exp(self.hazard(output)[:, None] - self.hazard(output[:, None] + ahead))
        return np.where(ahead < left[:, None], alive, 0.0)

    def survival(self, tokens: np.ndarray) -> np.ndarray:
        """P(length > tokens), the shape of ``tokens``."""
        return np.exp(-self.hazard(tokens))


class LengthHistory:
    """Lengths of finished responses, the newest :data:`WINDOW` of them."""

    def __init__(self) -> None:
        self._responses: deque[tuple[int, int, bool]] = deque()
        self._tokens = 0
        self._ended = np.zeros(len(EDGES))
        self._at_risk = np.zeros(len(EDGES))

    def __len__(self) -> int:
        return len(self._responses)

    def observe(self, length: int, family: int, finished: bool = True, since: int = 0) -> None:
        """Record a response that left the engine.

        Args:
            length: all its tokens; ``family``: a number that responses to one prompt share.
            finished: False for one that was cut (aborted, or at its limit): it would have gone on.
            since: tokens that it had when it came, of an earlier request that was cut there; this one takes its place.
        """
        earlier = int(since), int(family), False
        if since and earlier in self._responses:
            self._responses.remove(earlier)
            self._count(earlier[0], False, -1)
        self._responses.append((int(length), int(family), bool(finished)))
        self._count(length, finished, 1)
        if len(self._responses) > WINDOW:
            oldest, _, ended = self._responses.popleft()
            self._count(oldest, ended, -1)

    def estimate_mean(self, limit: int) -> float:
        """Mean length of the responses that ended; before the first one the prior's median for this ``limit``."""
        return self._tokens / len(self) if len(self) else limit * PRIOR_MEDIAN

    def _count(self, length: int, finished: bool, sign: int) -> None:
        self._tokens += sign * length
        at_risk = _count_at_risk(np.array([length]), np.array([finished]))
        self._at_risk += sign * at_risk
        if finished:
            self._ended[min(np.searchsorted(EDGES, length), len(EDGES) - 1)] += sign

    def make_curve(self, limit: int, running: np.ndarray | tuple[()] = ()) -> Curve:
        """The curve of response lengths.

        Args:
            limit: most tokens of a response; scales the prior.
            running: present lengths of the requests that still run, ``[requests]``; they are censored there.
        """
        prior = _compute_prior_hazard(float(np.log(max(limit, 2) * PRIOR_MEDIAN)))
        at_risk = self._at_risk
        if len(running):
            at_risk = at_risk + _count_at_risk(np.asarray(running), np.zeros(len(running), dtype=bool))
        hazard = (PRIOR_STRENGTH * prior + self._ended) / (PRIOR_STRENGTH + at_risk)
        steps = -np.log1p(-np.minimum(hazard, 1 - 1e-9))
        return Curve(np.concatenate([[0.0], np.cumsum(steps)]))


def _count_at_risk(lengths: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Responses at risk in each bin, ``[bins]``: whole bins lived through and the bin of an end count 1, the bin in
    which one was censored counts the share that it lived through."""
    bins = np.minimum(np.searchsorted(EDGES, lengths), len(EDGES) - 1)
    share = np.clip((lengths - _STARTS[bins]) / (EDGES - _STARTS)[bins], 0.0, 1.0)
    share = np.round(share * 1024) / 1024  # sums of these are exact: adding and removing leaves no residue
    here = np.bincount(bins, np.where(ended, 1.0, share), len(EDGES))
    later = np.cumsum(np.bincount(bins, minlength=len(EDGES))[::-1])[::-1]
    return here + np.concatenate([later[1:], [0]])
