"""What a sample says of the tokens in it, in its extra fields.

Both are runs: pairs of a token of the response and what holds from it on.  ``((0, 1), (37, 2))``: the first 37 tokens
come from a replica of TP degree 1, the others from one of degree 2.  Of a response in several turns: of its first turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Runs = Sequence[Sequence[int]]

DEGREES = "tp_from_token"
"""TP degree."""
STEPS = "global_steps_from_token"
"""verl's version of the weights: the step after which they were sent."""


def joined(parts: Iterable[tuple[int, Runs]]) -> Runs:
    """The runs of a response that was generated in parts: ``(tokens, runs)`` of each part."""
    found: list[tuple[int, int]] = []
    begin = 0
    for tokens, runs in parts:
        for start, value in runs:
            if start < tokens and (not found or found[-1][1] != value):
                found.append((begin + start, value))
        begin += tokens
    return tuple(found)


def spread(runs: Runs, tokens: int) -> list[int]:
    """The value of each of ``tokens`` tokens."""
    ends = [start for start, _ in runs][1:] + [tokens]
    return [value for (start, value), end in zip(runs, ends, strict=False) for _ in range(start, min(end, tokens))]
