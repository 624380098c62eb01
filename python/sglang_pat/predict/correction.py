"""How much slower or faster than its profile each layout runs (:class:`StepFactors`), learnt from the steps of this
run.

Of the steps that a leader reports, the logarithm of measured over predicted time is

    y = common + scale[tp] + by_batch[tp] * log(batch / BATCH) + by_context[tp] * log(context / CONTEXT) + noise

``common`` is the machine's speed on this day.  It is the same in all layouts, so it costs nothing and no decision hangs
on it.  The others are what the profile gets wrong about one layout beside the others; that is what misleads a policy.
All are normal with mean 0 before anything is seen, are learnt by a Kalman filter, and go slowly back to 0 (an
Ornstein-Uhlenbeck process), so that a profile counts for as long as the run says nothing else.  A layout that was never
visited has the common factor, and the farther a batch and a context are from what was seen, the less is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from sglang_pat.predict.predictor import Number, StepPredictor, Value

BATCH, CONTEXT = 8, 1024
"""Where a layout's scale holds: in the middle of what a calibration measures."""

COMMON_SPREAD, COMMON_SECONDS = 0.3, 600.0
"""Prior standard deviation of the common log-factor, and the time in which it goes back: other programs come and go."""

OWN_SPREADS, OWN_SECONDS = np.array([0.15, 0.05, 0.03]), 86_400.0
"""Prior standard deviations and time of each layout's own part: its scale, and how it grows with the logarithms of
batch and context.  What is wrong in a profile stays wrong."""

STEP_NOISE, REPORT_NOISE = 0.2, 0.1
"""Standard deviations of the logarithm of one step's time, independent from step to step, and of what the steps of one
report share."""

OUTLIER = 3.0
"""A report that is off by more than so many standard deviations counts as one that is off by so many: a pause of the
machine is no property of a layout."""


TURNS = ((16, 64), (1, 8192), (1, 64), (4, 2048))
"""Turns of a calibration: requests for each replica of the lowest degree, and tokens of each.  The first two are the
ends of a draining batch; a slow machine has no others."""

SHARES = (0.2, 1.0, 5.0)
"""Multiples of their usual spread that the layouts' own parts may have after a calibration: for a profile that is
right, for one that is off, and for one of something else."""

TURN_NOISES = (0.03, 0.1, 0.3)
"""What the noise of a layout in one turn may be: from a machine that is ours alone to one that is not."""


class StepFactor(NamedTuple):
    """Measured over predicted time of a step: ``scale * (batch / BATCH)**by_batch * (context / CONTEXT)**by_context``.

    ``batch``: requests of one replica; ``context``: tokens of each of them, on average.
    """

    scale: float = 1.0
    by_batch: float = 0.0
    by_context: float = 0.0

    def evaluate(self, batch: Number, tokens: Number) -> Number:
        """The factor for ``batch`` requests with ``tokens`` tokens together; broadcasts."""
        requests = np.maximum(batch, 1.0)
        log_context = np.log(np.maximum(tokens / requests, 1.0) / CONTEXT)
        factor = self.scale * np.exp(self.by_batch * np.log(requests / BATCH) + self.by_context * log_context)
        return float(factor) if np.ndim(factor) == 0 else factor


class Steps(NamedTuple):
    """Decode steps of replicas of one degree: how many, their requests and tokens summed, and their seconds, as
    measured and as the profile has it."""

    steps: float
    requests: float
    tokens: float
    seconds: float
    predicted: float

    @property
    def log_ratio(self) -> float:
        return math.log(self.seconds / self.predicted)


class StepFactors:
    """Estimates for ``degrees``; times are seconds of one clock."""

    def __init__(self, degrees: tuple[int, ...]) -> None:
        self.degrees = degrees
        # The common factor first, then the three numbers of each layout.
        self._prior = np.diag([COMMON_SPREAD**2, *np.tile(OWN_SPREADS**2, len(degrees))])
        self._rate = 1 / np.array([COMMON_SECONDS, *[OWN_SECONDS] * (3 * len(degrees))])
        self._mean, self._covariance = np.zeros(len(self._prior)), self._prior.copy()
        self._time: float | None = None

    def observe(self, tp: int, report: Steps, now: float) -> None:
        """Learn from steps that a replica of degree ``tp`` reports."""
        if min(report) > 0:
            noise = STEP_NOISE**2 / report.steps + REPORT_NOISE**2
            self._forget(now)
            self._observe(self._make_observation_row(tp, report), report.log_ratio, noise, most=OUTLIER)

    def calibrate(self, turns: Sequence[Mapping[int, Steps]], now: float) -> None:
        """Learn from turns before a run, in each of which all layouts were measured, one shortly after the other.

        What is common to all layouts of a turn is taken out.  How wrong the profile is and how noisy the machine is are
        then taken to be what explains best what is left: so a right profile is hardly moved, neither now nor later
        (empirical Bayes).

        Args:
            turns: steps by degree of each turn; turns without a degree do not count.
        """
        whole = [turn for turn in turns if all(min(turn.get(tp, (0,))) > 0 for tp in self.degrees)]
        if not whole or len(self.degrees) == 1:
            return
        sees = np.array(
            [[self._make_observation_row(tp, turn[tp]) for tp in self.degrees] for turn in whole]
        )  # [turns, degrees, size]
        logs = np.array([[turn[tp].log_ratio for tp in self.degrees] for turn in whole])
        common = np.eye(sees.shape[-1])[0]
        own = (sees - sees.mean(axis=1, keepdims=True)).reshape(-1, len(common))
        left = (logs - logs.mean(axis=1, keepdims=True)).ravel()

        def likelihood(explanation: tuple[float, float]) -> float:
            share, noise = explanation
            covariance = share**2 * own @ self._prior @ own.T + noise**2 * np.eye(len(left))
            variances, axes = np.linalg.eigh(covariance)
            return -float((np.log(variances) + (left @ axes) ** 2 / variances).sum())

        share, noise = max(product(SHARES, TURN_NOISES), key=likelihood)
        self._prior[1:, 1:] *= share**2
        self._covariance = self._prior.copy()
        self._forget(now)
        self._observe(common, float(logs.mean()), REPORT_NOISE**2)
        for row, log in zip(own, left.tolist(), strict=True):
            self._observe(row, log, noise**2)

    def _make_observation_row(self, tp: int, report: Steps) -> np.ndarray:
        """What steps of degree ``tp`` tell of, ``[size]``."""
        batch, context = report.requests / report.steps, report.tokens / report.requests
        sees = np.zeros(len(self._mean))
        sees[0] = 1.0
        own = sees[1:].reshape(-1, 3)[self.degrees.index(tp)]
        own[:] = 1.0, math.log(batch / BATCH), math.log(context / CONTEXT)
        return sees

    def _observe(self, sees: np.ndarray, log: float, noise: float, most: float = math.inf) -> None:
        """``log``: of measured over predicted time; ``noise``: its variance; ``most``: standard deviations that it may
        be off."""
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

    def get_factors(self) -> dict[int, StepFactor]:
        """Factors of the step times, by degree."""
        own = self._mean[1:].reshape(-1, 3)
        own_by_degree = zip(self.degrees, own.tolist(), strict=True)
        return {tp: StepFactor(math.exp(self._mean[0] + scale), *by) for tp, (scale, *by) in own_by_degree}

    def compute_uncertainty(self, here: int, num_ranks: int, lengths: np.ndarray) -> dict[int, float]:
        """Standard deviation of the logarithm of each degree's factor over that of ``here``.

        Args:
            lengths: tokens of each request in the engine, ``[requests]``: at this batch and context.
        """
        context = float(lengths.mean()) if len(lengths) else CONTEXT

        def sees(tp: int) -> np.ndarray:
            batch = max(len(lengths) * tp / num_ranks, 1.0)
            return self._make_observation_row(tp, Steps(1, batch, batch * context, 1.0, 1.0))

        off = np.array([sees(tp) - sees(here) for tp in self.degrees])
        variance = ((off @ self._covariance) * off).sum(axis=1)  # what they have in common is not in it
        return dict(zip(self.degrees, np.sqrt(np.maximum(variance, 0.0)).tolist(), strict=True))


class CorrectedPredictor:
    """A predictor whose decode steps are multiplied by the factor of each degree; 1 for degrees that have none.

    No prefill is observed.  So of prefills only the speed of the machine is known: the mean scale of all degrees
    (geometric).  A degree's own scale says nothing of them.  It holds for steps with :data:`CONTEXT` tokens a request,
    and follows from steps with many more and many fewer.
    """

    def __init__(self, predictor: StepPredictor, factors: Mapping[int, StepFactor]) -> None:
        self._predictor, self._factors = predictor, factors
        scales = [factor.scale for factor in factors.values()]
        self._machine = float(np.exp(np.mean(np.log(scales)))) if scales else 1.0

    def has_prefill(self, tp: int) -> bool:
        return self._predictor.has_prefill(tp)

    def step_seconds(self, tp: int, batch: Value, tokens: Value, replicas: Value | None = None) -> Value:
        """Seconds of a decode step, corrected; see :meth:`Predictor.step_seconds`."""
        seconds: Any = self._predictor.step_seconds(tp, batch, tokens, replicas)
        return seconds * self._factors[tp].evaluate(batch, tokens) if tp in self._factors else seconds

    def prefill_uniform(self, tp: int, batch: Value, length: Value, replicas: Value | None = None) -> Value:
        """Seconds of a prefill, times the speed of the machine; see :meth:`Predictor.prefill_uniform`."""
        return self._machine * self._predictor.prefill_uniform(tp, batch, length, replicas)
