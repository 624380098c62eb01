"""What is expected of the running batch: how many requests are left after so many more tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Load

STEPS = 48
"""Intervals of the grid over future tokens."""

FIRST_STEP = 16
"""Tokens of its first interval; the others grow geometrically up to the most that any request may still generate."""

CLASSES = 96
"""Requests alike in length, limit and family are counted together, into about this many classes at most."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The batch in each interval of the grid, float64 ``[intervals]``, taken at the interval's middle.

    Attributes:
        width: token steps in the interval.
        any_alive: probability that a request is left.
        number: requests left, given that one is.
        context: KV tokens of one that is left, on average.
        response: tokens that a response has, as requests are routed by it; one number.
    """

    width: np.ndarray
    any_alive: np.ndarray
    number: np.ndarray
    context: np.ndarray
    response: float = np.inf


def grid(longest: int, steps: int = STEPS) -> np.ndarray:
    """Interval ends ``[intervals + 1]``, from 0 to ``longest`` tokens ahead; increasing integers."""
    if longest <= FIRST_STEP:
        return np.array([0.0, longest])
    ends = FIRST_STEP * (longest / FIRST_STEP) ** (np.arange(steps) / (steps - 1))
    return np.concatenate([[0.0], np.unique(np.round(ends))])


def look_ahead(load: Load, history: LengthHistory) -> Outlook | None:
    """Survival of every running request given its present length; None if all are at their limit.

    Requests are taken as independent given what is known of their families.
    """
    left = load.limit - load.output
    longest = int(left.max())
    if longest <= 0:
        return None
    curve = history.curve(int(load.limit.max()), load.output)
    mean, spread = history.expect(curve, load.family, load.output)
    # One at its limit ends with the next step; averaged with others it would end them too.
    on = left > 0
    members, (output, left, mean, spread, prompt) = _classes(
        load.output[on], left[on], mean[on], spread[on], load.prompt[on]
    )
    ends = grid(longest)
    ahead = (ends[:-1] + ends[1:]) / 2

    def log_reached(tokens: np.ndarray) -> np.ndarray:
        """Of P(length > tokens), ``[classes, intervals]``."""
        return log_ndtr((mean[:, None] - curve.score(tokens)) / spread[:, None])

    alive = np.exp(log_reached(output[:, None] + ahead) - log_reached(output[:, None]))
    alive = np.where(ahead < left[:, None], alive, 0.0)
    number = members @ alive
    none_alive = np.exp(members @ np.log1p(-np.minimum(alive, 1 - 1e-15)))
    any_alive = np.maximum(1 - none_alive, 1e-12)
    tokens = (members * (prompt + output)) @ alive + number * ahead
    number = np.maximum(number, 1e-12)
    return Outlook(
        width=np.diff(ends),
        any_alive=any_alive,
        number=np.maximum(number / any_alive, 1.0),
        context=tokens / number,
        response=history.expected(int(load.limit.max())),
    )


def _classes(
    output: np.ndarray, left: np.ndarray, mean: np.ndarray, spread: np.ndarray, prompt: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Requests counted together: members of each class, and each quantity's mean in it, float64 ``[classes]``."""
    quantities = [np.asarray(q, dtype=float) for q in (output, left, mean, spread, prompt)]
    keys = [np.log(quantities[0] + 16), np.log(np.maximum(quantities[1], 1)), *quantities[2:4]]
    resolution = 32.0
    while True:
        code = np.zeros(len(output), dtype=np.int64)
        for key in keys:
            code = code * 4096 + np.floor((key - key.min()) * resolution).astype(np.int64)
        _, index, members = np.unique(code, return_inverse=True, return_counts=True)
        if len(members) <= CLASSES:
            return members.astype(float), [np.bincount(index, q) / members for q in quantities]
        resolution /= 2
