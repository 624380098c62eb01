"""What a policy that predicts asks: how long a step, a prefill and a switch take."""

from __future__ import annotations

from typing import Protocol, overload

import numpy as np

from sglang_pat.predict.cost import SwitchCost
from sglang_pat.predict.predictor import Number


class StepPredictor(Protocol):
    """Seconds of one replica; :class:`~sglang_pat.predict.predictor.Predictor` says what the arguments are.

    Scalars give a float; if any argument is an array, so is the answer.
    """

    @overload
    def step_seconds(self, tp: int, batch: float, tokens: float, replicas: float | None = None) -> float: ...

    @overload
    def step_seconds(self, tp: int, batch: Number, tokens: Number, replicas: Number | None = None) -> Number: ...

    def has_prefill(self, tp: int) -> bool: ...

    @overload
    def prefill_uniform(self, tp: int, batch: float, length: float, replicas: float | None = None) -> float: ...

    @overload
    def prefill_uniform(self, tp: int, batch: Number, length: Number, replicas: Number | None = None) -> Number: ...


class SwitchPredictor(Protocol):
    """Cost of a switch; :class:`~sglang_pat.predict.cost.SwitchCosts` says what the arguments are."""

    def estimate(
        self, from_tp: int, to_tp: int, lengths: np.ndarray | tuple[()] = (), waiting: int = 0
    ) -> SwitchCost: ...
