"""A task: what the policy learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Verifier = Callable[[str, str], float]
"""Reward of an answer to a problem, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: problems to train and to test, how they become tokens, and how answers are read."""

    problems: Sequence[str]
    held_out: Sequence[str]
    make_prompt: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    verify: Verifier
