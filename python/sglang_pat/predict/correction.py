"""How much slower or faster than its profile each layout runs, learnt from the steps of this run.

Of the steps that a leader reports, the logarithm of measured over predicted time is

    y = common + between[tp] + noise

``common`` is the machine's speed on this day.  It is the same in all layouts, so it costs nothing and no decision hangs
on it.  ``between`` is what the profile gets wrong about one layout beside the others; that is what misleads a policy.
Both are normal with mean 0 before anything is seen, are learnt by a Kalman filter, and go slowly back to 0 (an
Ornstein-Uhlenbeck process), so that a profile counts for as long as the run says nothing else.  A layout that was never
visited has the common factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np

from sglang_pat.predict.predictor import Number
from sglang_pat.predict.protocols import StepPredictor

COMMON_SPREAD, COMMON_SECONDS = 0.3, 600.0
"""Prior standard deviation of the common log-factor, and the time in which it goes back: other programs come and go."""

BETWEEN_SPREAD, BETWEEN_SECONDS = 0.15, 86_400.0
"""The same of each layout's own: what is wrong in a profile stays wrong."""

STEP_NOISE, REPORT_NOISE = 0.2, 0.1
"""Of the logarithm of one step's time, independent from step to step; and of what the steps of one report share."""

OUTLIER = 3.0
"""A report that is off by more than so many standard deviations counts as one that is off by so many: a pause of the
machine is no property of a layout."""


TURNS = (1, 4, 1, 4)
"""Requests of a calibration's turns, for each replica of the lowest degree: what a profile gets wrong may depend on the
batch."""

PROMPT = 64
"""Tokens of each of them: the shortest context that profiles have."""

CONFIRMED_SPREAD, ELSEWHERE_SPREAD = 0.03, 0.02
"""Standard deviations of the logarithm: of each layout's own part where a calibration has found nothing wrong; of what
a calibration says for other batches than its own."""


class StepFactors:
    """Estimates for ``degrees``; time is an argument, seconds of one clock."""

    def __init__(self, degrees: tuple[int, ...]) -> None:
        self.degrees = degrees
        size = len(degrees) + 1  # the common factor first, then one for each layout
        self._prior = np.diag([COMMON_SPREAD**2, *[BETWEEN_SPREAD**2] * len(degrees)])
        self._rate = 1 / np.array([COMMON_SECONDS, *[BETWEEN_SECONDS] * len(degrees)])
        self._mean, self._covariance = np.zeros(size), self._prior.copy()
        self._time: float | None = None

    def observe(self, tp: int, measured: float, predicted: float, steps: int, now: float) -> None:
        """A replica of degree ``tp`` made ``steps`` steps in ``measured`` seconds; by its profile ``predicted``."""
        if min(measured, predicted, steps) > 0:
            noise = STEP_NOISE**2 / steps + REPORT_NOISE**2
            self._observe(tp, math.log(measured / predicted), noise, now, most=OUTLIER)

    def calibrate(self, turns: Sequence[Mapping[int, float]], now: float) -> None:
        """Before a run: all layouts were measured in turns, one shortly after the other.

        How far the turns agree says how much they are worth: what is common to all layouts of a turn is taken out, and
        what is left is noise.  How far the layouts differ beyond that noise says how wrong the profile is: a right one
        is hardly moved, neither now nor later (empirical Bayes).

        Args:
            turns: of each, measured over predicted time of a step by degree; turns without a degree do not count.
        """
        logs = np.log([[turn[tp] for tp in self.degrees] for turn in turns if set(turn) >= set(self.degrees)])
        if not logs.size or len(self.degrees) == 1:
            return
        means = logs.mean(axis=0)
        left = logs - means - logs.mean(axis=1, keepdims=True) + logs.mean()
        free = (len(logs) - 1) * (len(self.degrees) - 1)
        noise = (float((left**2).sum()) + REPORT_NOISE**2) / (free + 1)  # as if one more had the noise of a report
        noise /= len(logs)  # of a mean
        spread = min(max(float(means.var(ddof=1)) - noise, CONFIRMED_SPREAD**2), BETWEEN_SPREAD**2)
        np.fill_diagonal(self._prior[1:, 1:], spread)
        self._covariance = self._prior.copy()
        for tp, mean in zip(self.degrees, means.tolist(), strict=True):
            self._observe(tp, mean, noise + ELSEWHERE_SPREAD**2, now)

    def _observe(self, tp: int, log: float, noise: float, now: float, most: float = math.inf) -> None:
        """``log``: of measured over predicted time; ``noise``: its variance; ``most``: standard deviations that it may
        be off."""
        self._forget(now)
        sees = np.zeros(len(self._mean))
        sees[[0, 1 + self.degrees.index(tp)]] = 1.0
        gains = self._covariance @ sees
        variance = float(sees @ gains) + noise
        off, most = log - float(sees @ self._mean), most * math.sqrt(variance)
        self._mean += gains * (min(max(off, -most), most) / variance)
        self._covariance -= np.outer(gains, gains) / variance

    def _forget(self, now: float) -> None:
        passed = max(now - self._time, 0.0) if self._time is not None else 0.0
        self._time = now
        keep = np.exp(-self._rate * passed)
        self._mean *= keep
        self._covariance = self._prior + keep[:, None] * (self._covariance - self._prior) * keep

    def factors(self) -> dict[int, float]:
        """Measured over predicted time of a step, by degree."""
        return dict(zip(self.degrees, np.exp(self._mean[0] + self._mean[1:]).tolist(), strict=True))

    def doubts(self, tp: int) -> dict[int, float]:
        """Standard deviation of the logarithm of each degree's factor over that of ``tp``."""
        own, place = self._covariance[1:, 1:], self.degrees.index(tp)
        variance = np.diag(own) + own[place, place] - 2 * own[place]  # what they have in common is not in it
        return dict(zip(self.degrees, np.sqrt(np.maximum(variance, 0.0)).tolist(), strict=True))


class Corrected:
    """A predictor whose times are multiplied by one factor for each degree; 1 for degrees that have none."""

    def __init__(self, predictor: StepPredictor, factors: Mapping[int, float]) -> None:
        self._predictor, self._factors = predictor, factors

    def has_prefill(self, tp: int) -> bool:
        return self._predictor.has_prefill(tp)

    @overload
    def step_seconds(self, tp: int, batch: float, tokens: float, replicas: float | None = None) -> float: ...

    @overload
    def step_seconds(self, tp: int, batch: Number, tokens: Number, replicas: Number | None = None) -> Number: ...

    def step_seconds(self, tp: int, batch: Number, tokens: Number, replicas: Number | None = None) -> Number:
        """As :meth:`Predictor.step_seconds`."""
        return self._factors.get(tp, 1.0) * self._predictor.step_seconds(tp, batch, tokens, replicas)

    @overload
    def prefill_uniform(self, tp: int, batch: float, length: float, replicas: float | None = None) -> float: ...

    @overload
    def prefill_uniform(self, tp: int, batch: Number, length: Number, replicas: Number | None = None) -> Number: ...

    def prefill_uniform(self, tp: int, batch: Number, length: Number, replicas: Number | None = None) -> Number:
        """As :meth:`Predictor.prefill_uniform`."""
        return self._factors.get(tp, 1.0) * self._predictor.prefill_uniform(tp, batch, length, replicas)
