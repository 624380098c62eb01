"""What is learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Verifier = Callable[[str, str], float]
"""What an answer to a problem is worth, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems to train and to test, how they are put into tokens, and how answers are read."""

    problems: Sequence[str]
    held_out: Sequence[str]
    make_prompt: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    verify: Verifier
