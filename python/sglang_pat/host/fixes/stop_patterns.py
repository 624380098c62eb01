"""Bounds for a ``stop_regex``, of which one can hold all requests of an engine for hours.

SGLang looks for each pattern through the whole response, after every token, on every rank, with Python's engine, which
no time limit reaches.

Here ranks look through the last :data:`LONGEST_TEXT` characters only, and patterns that may take too long there are
refused.  A time limit would not do: the ranks of a group have to come to the same result.

Upstream: https://github.com/sgl-project/sglang/pull/28203
"""

from __future__ import annotations

import math
import re
import re._constants as sre  # pyright: ignore[reportMissingImports]  # there is no public parser; SGLang has it from here too
import re._parser as sre_parse  # pyright: ignore[reportMissingImports]
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sglang.srt.managers.schedule_batch import Req

LONGEST_TEXT = 4096
"""Number of characters at the end of a response that are looked through."""

MAX_CHARACTERS = 1024
"""Most characters of a request's patterns together: parsing them holds up the server, and compiling them the ranks."""

MAX_OTHERS = 16 * MAX_CHARACTERS
"""Most characters of the patterns of a request for many samples, equal ones counted once: they are parsed in one go."""

MAX_STEPS = 32 * LONGEST_TEXT
"""Most steps of the patterns of a request together, from one place of the text: an open-ended repetition with some
thirty characters after it."""

REPETITION = 60
"""Steps that it costs to begin a repetition, and each turn of one of more than a character: about as many characters
are compared in that time."""

CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY)
REPETITIONS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
GROUPS = (sre.SUBPATTERN, sre.ASSERT, sre.ASSERT_NOT)

_stock_tail = Req.tail_str


def tail_str(req: Req, *accepted: int) -> str:
    """End of the response that SGLang searches, of bounded length; a complete stop string is in it.

    ``accepted``: tokens of the last step, where SGLang says so.
    """
    text = _stock_tail(req, *accepted)
    return text[-LONGEST_TEXT:] if req.sampling_params.stop_regex_strs else text


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse patterns of a request that may be looked for during hours.

    Raises:
        ValueError: no patterns, or more than :data:`MAX_CHARACTERS` or :data:`MAX_STEPS` together.
    """
    if (characters := sum(map(len, patterns))) > MAX_CHARACTERS:
        raise ValueError(f"sampling_params.stop_regex: {characters} characters, at most {MAX_CHARACTERS} are allowed")
    left = float(MAX_STEPS)
    for pattern in patterns:
        left -= count_steps(pattern)
        if left < 0:
            raise ValueError(
                f"sampling_params.stop_regex {pattern[:60]!r}: may take for ever; write fewer patterns, with one "
                "open-ended repetition at most, of a character or class, and a short end after it"
            )


@lru_cache(maxsize=MAX_OTHERS)
def count_steps(pattern: str) -> float:
    """Number of steps to look for ``pattern`` from one place of the text, at most; a character or a class is one.

    Raises:
        ValueError: it is no pattern, or has references to groups.
    """
    try:
        return _count(sre_parse.parse(pattern))[1]
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"sampling_params.stop_regex {pattern[:60]!r}: {error}") from None


def _count(parsed: Any) -> tuple[float, float]:
    """``(ways, steps)``: the number of ways in which a part of a pattern may match, and of steps to try them all.

    Each token is tried after every way in which those before it matched.
    """
    ways, steps = 1.0, 0.0
    for token, value in parsed:
        inner_ways, inner_steps = 1.0, 1.0
        if token == sre.BRANCH:
            branches = [_count(branch) for branch in value[1]]
            inner_ways, inner_steps = sum(way for way, _ in branches), 1 + sum(step for _, step in branches)
        elif token in GROUPS or token == sre.ATOMIC_GROUP:
            inner_ways, inner_steps = _count(value if token == sre.ATOMIC_GROUP else value[-1])
            inner_steps += 1
        elif token in REPETITIONS:
            inner_ways, inner_steps = _count_repetition(*value)
        elif token in (sre.GROUPREF, sre.GROUPREF_EXISTS):
            raise re.error("references to groups are not supported")
        ways, steps = ways * inner_ways, steps + ways * inner_steps
    return ways, steps


def _count_repetition(least: int, most: int, inner: Any) -> tuple[float, float]:
    """``(ways, steps)`` of a repetition; ``inner`` is tried at least ``least`` times, even if it takes no text."""
    ways, steps = _count(inner)
    turns = max(least, min(most, LONGEST_TEXT // max(1, inner.getwidth()[0])))
    if not (len(inner) == 1 and inner[0][0] in CHARACTERS):  # Python's engine has nothing to remember of these
        steps += REPETITION
    return _sum_powers(ways, least, turns), REPETITION + (steps * _sum_powers(ways, 0, turns - 1) if turns else 0)


def _sum_powers(base: float, least: int, most: int) -> float:
    """The sum of ``base ** k`` for k from ``least`` to ``most``; ``base`` is at least 1."""
    if base == 1:
        return most - least + 1
    if (most + 1) * math.log(base) > 100:
        return math.inf
    return (base ** (most + 1) - base**least) / (base - 1)
