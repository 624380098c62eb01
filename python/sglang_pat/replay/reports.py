"""What the leaders of a simulated engine report of their steps, and what is learnt from it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_pat.predict.correction import TURNS, StepFactors, Steps
from sglang_pat.predict.protocols import StepPredictor
from sglang_pat.replay.simulate import Drain

REPORT_STEPS = 32
"""Steps that a leader tells of in one report, at most."""


class Reports:
    """What leaders report of their steps, with noise, and what is learnt from it.

    Args:
        believed: predictor of the profile that the policy has.
        noise: standard deviation of the logarithm of the measured times, independent from report to report.

    Attributes:
        factors: what is known now; kept from round to round.
        clock: seconds of all rounds so far.
    """

    def __init__(
        self, believed: StepPredictor, degrees: tuple[int, ...], noise: float, random: np.random.Generator
    ) -> None:
        self.factors, self.clock = StepFactors(degrees), 0.0
        self._believed, self._noise, self._random = believed, noise, random

    def calibrate(self, right: StepPredictor, num_ranks: int, noise: float) -> None:
        """As an engine does before its first request; ``noise``: as above, of a layout in one turn."""
        degrees, turns = self.factors.degrees, list[dict[int, Steps]]()
        for each, context in TURNS:
            turn: dict[int, Steps] = {}
            for tp in degrees:
                batch = each * tp / degrees[0]
                load = tp, batch, batch * context, num_ranks / tp
                took = right.step_seconds(*load) * float(np.exp(noise * self._random.normal()))
                turn[tp] = Steps(1, batch, batch * context, took, self._believed.step_seconds(*load))
            turns.append(turn)
        self.factors.calibrate(turns, self.clock)

    def begin(self, drain: Drain) -> Callable[[int, float, int], None]:
        """A round: a function of (point, seconds, degree since the point before) to be called at each point."""
        predicted, before = drain.elapsed(self._believed), 0
        prompt, length = drain.batch.prompt, drain.batch.length

        def reach(point: int, now: float, tp: int) -> None:
            nonlocal before
            measured = drain.spent(tp, before, point)
            expected = predicted[tp][:, point] - predicted[tp][:, before]
            start, end = int(drain.points[before]), int(drain.points[point])
            steps = end - start
            replica = np.arange(len(length)) % len(measured)
            made = np.clip(length, start, end) - start  # by each request
            requests = np.bincount(replica, made, len(measured))
            tokens = np.bincount(replica, made * (prompt + start + made / 2), len(measured))
            number = -(-steps // REPORT_STEPS)
            for *batch, took, ought in zip(requests, tokens, measured, expected, strict=True):
                if ought > 0:
                    for noise in np.exp(self._noise * self._random.normal(size=number)):
                        each = (float(total) / number for total in (*batch, took * noise, ought))
                        self.factors.observe(tp, Steps(steps // number, *each), self.clock + now)
            before = point

        return reach
