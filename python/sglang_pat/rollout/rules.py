"""What a training job asks of the admitter (:class:`Rules`), checked."""

from __future__ import annotations

import math
from typing import Any

import msgspec

MODES = ("strict", "reorder", "partial")
LARGEST = 1 << 20


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rounds are made.  ``P0`` and ``R0`` as in RollPacker section 3.

    Attributes:
        num_prompts: P0, prompts (groups) of a batch.
        num_responses: R0, responses to each.
        mode: ``strict`` (tail batching), ``reorder`` (verl's recipe) or ``partial`` (partial rollout).
        eta_prompts: η_P, prompts started over prompts kept; in ``partial`` samples under way over a batch's samples.
        eta_responses: η_R, responses started over responses kept (RollPacker: 1.25).
        max_deferrals: rounds that may pass a prompt over once it was started.
        max_staleness: weight versions between a returned token and the round's (``partial``).
        filter_groups: each complete group waits for :meth:`Admitter.record_verdict` (DAPO's dynamic sampling).
        unbiased: a deferred prompt is drawn anew on the condition that deferred it (``strict``), see ``redraws.py``.
    """

    num_prompts: int
    num_responses: int
    mode: str = "strict"
    eta_prompts: float = 1.25
    eta_responses: float = 1.0
    max_deferrals: int = 8
    max_staleness: int = 1
    filter_groups: bool = False
    unbiased: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError: one line that names the field, what was given and what is allowed."""
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}, must be one of {', '.join(MODES)}")
        for name in ("num_prompts", "num_responses"):
            _check(name, getattr(self, name), 1, LARGEST)
        for name in ("max_deferrals", "max_staleness"):
            _check(name, getattr(self, name), 0, LARGEST)
        for name in ("eta_prompts", "eta_responses"):
            value = getattr(self, name)
            if not (_is(value, int, float) and math.isfinite(value) and 1 <= value <= 64):
                raise ValueError(f"{name} is {value!r}, must be a number between 1 and 64")
        for name in ("filter_groups", "unbiased"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {value!r}, must be true or false")
        if self.mode == "partial" and self.eta_responses != 1:
            raise ValueError(f"eta_responses is {self.eta_responses}, must be 1 in partial: every response is kept")
        if self.unbiased and self.mode != "strict":
            raise ValueError(f"unbiased is for mode strict, not {self.mode}: leave it out, or change the mode")
        if self.unbiased and self.eta_responses != 1:
            raise ValueError(
                f"eta_responses is {self.eta_responses}, must be 1 if unbiased: to keep the first responses is a bias"
            )

    @property
    def keeps(self) -> bool:
        """Whether tokens outlive their round."""
        return self.mode == "partial"

    @property
    def started_prompts(self) -> int:
        """⌈η_P · P0⌉."""
        return _multiply(self.eta_prompts, self.num_prompts)

    @property
    def started_responses(self) -> int:
        """⌈η_R · R0⌉; of one response ⌊η_R⌋, else a quarter more would be twice as many."""
        return _multiply(self.eta_responses, self.num_responses) if self.num_responses > 1 else int(self.eta_responses)


def _multiply(eta: float, count: int) -> int:
    # 1.1 * 10 is 11.000000000000002, which is not meant to be 12.
    return math.ceil(round(eta * count, 6))


def _check(name: str, value: Any, least: int, most: int) -> None:
    if not (_is(value, int) and least <= value <= most):
        raise ValueError(f"{name} is {value!r}, must be a whole number between {least} and {most}")


def _is(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
