"""Names of a sample's extra fields, which describe the tokens in it, and the runs that are their values.

The first two are runs: pairs of a token of the response and what holds from it on.  ``[(0, 1), (37, 2)]``: the first
37 tokens come from a replica of TP degree 1, the others from one of degree 2.  None: tokens that no replica generated,
as a tool's answer between two turns, or of which it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Runs = Sequence[tuple[int, int | None]]

DEGREES = "tp_from_token"
"""Field with the runs of TP degrees."""
STEPS = "global_steps_from_token"
"""Field with the runs of verl's versions of the weights: the step after which they were sent."""
STOPS = "stop_reasons"
"""Field with the reason why each turn ended, in SGLang's words; a list, no runs."""
MOVES = "engine_died_after"
"""Field with the number of tokens of a turn after which the engine died that had it; a list, for each such engine.
Others do not have it."""
MISSING = "reward_is_missing"
"""Field that is true for a sample that has no reward, as the function failed; others do not have it."""
STOPPED = "stopped"
"""Reason of a turn that ended because the engine was told that nobody waits for the response any more.  After another
abort verl's client of asynchronous trainers goes on."""


def was_stopped(fields: Mapping[str, Any]) -> bool:
    """Whether the engine was told to stop while it generated a turn of this response."""
    return not {"abort", STOPPED}.isdisjoint(fields.get(STOPS, ()))


class Turns(list[Any]):
    """The value of a field of a response so far: the runs of its turns, or the reason why each ended.

    verl takes a sample's extra fields from its first turn.  So later turns are added to the list that is there.

    Args:
        prompt: number of tokens before the response.
    """

    def __init__(self, prompt: int = 0) -> None:
        super().__init__()
        self.prompt = prompt
        self.end = 0

    def add(self, start: int, tokens: int, runs: Runs) -> None:
        """Add ``tokens`` tokens, the first of which is token ``start`` of the response; ``runs`` count from it."""
        while self and self[-1][0] >= start:  # the end of a turn may be cut off before its tool's answer
            self.pop()
        if start > self.end:
            self.append((self.end, None))
        if tokens and not runs:
            runs = ((0, None),)
        for offset, value in runs:
            if offset < tokens and (not self or self[-1][1] != value):
                self.append((start + offset, value))
        self.end = start + tokens


def join_spans(parts: Iterable[tuple[int, Runs]]) -> Runs:
    """The runs of what was generated in parts: ``(tokens, runs)`` of each part."""
    turns = Turns()
    for tokens, runs in parts:
        turns.add(turns.end, tokens, runs)
    return tuple(turns)


def expand_runs(runs: Runs, tokens: int) -> list[int | None]:
    """The value of each of ``tokens`` tokens."""
    ends = [start for start, _ in runs][1:] + [tokens]
    return [value for (start, value), end in zip(runs, ends, strict=False) for _ in range(start, min(end, tokens))]
