"""What it may cost to look for a ``stop_regex``: SGLang looks for each one after every token, on every rank.

Everything here raises ValueError with one line that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import math
import re
import re._parser as sre_parse  # pyright: ignore[reportMissingImports]  # there is no public one; SGLang has it from here too
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

LONGEST_TEXT = 4096
"""Characters at the end of a response that are looked through (``rank/stops.py``)."""

MAX_CHARACTERS = 1024
"""Of the patterns of a request together: parsing them holds everybody up, and so does compiling them on the ranks."""

MAX_OTHERS = 16 * MAX_CHARACTERS
"""Characters of the patterns of a request for many samples, equal ones counted once: they are parsed in one go."""

MAX_STEPS = 32 * LONGEST_TEXT
"""Of the patterns of a request together, from one place of the text: what an open-ended repetition may come to with
some thirty characters after it."""

REPETITION = 60
"""Steps that it costs to begin a repetition, and each turn of one of more than a character: about as many characters
are compared in that time."""


class Cost(NamedTuple):
    """Of a part of a pattern, from one place of the text, at most.

    Attributes:
        ways: in which it may match.
        steps: to try all of them; a character or a class of them is one.
    """

    ways: float
    steps: float


def check(patterns: Sequence[str]) -> None:
    """Refuse patterns of a request that may be looked for during hours.

    Raises:
        ValueError: no patterns, or more than :data:`MAX_CHARACTERS` or :data:`MAX_STEPS` together.
    """
    if (given := sum(map(len, patterns))) > MAX_CHARACTERS:
        raise ValueError(f"sampling_params.stop_regex: {given} characters, at most {MAX_CHARACTERS} are allowed")
    left = float(MAX_STEPS)
    for pattern in patterns:
        left -= steps(pattern)
        if left < 0:
            raise ValueError(
                f"sampling_params.stop_regex {_short(pattern)}: may take for ever; write fewer patterns, with one "
                "open-ended repetition at most, of a character or class, and a short end after it"
            )


@lru_cache(maxsize=MAX_OTHERS)
def steps(pattern: str) -> float:
    """Steps to look for ``pattern`` from one place of the text, at most.

    Raises:
        ValueError: it is no pattern, or has references to groups.
    """
    try:
        return _sequence(sre_parse.parse(pattern)).steps
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"sampling_params.stop_regex {_short(pattern)}: {error}") from None


def _sequence(parsed: Any) -> Cost:
    """Each part is tried after every way in which those before it matched."""
    ways, steps = 1.0, 0.0
    for token, value in parsed:
        one = _part(token, value)
        ways, steps = ways * one.ways, steps + ways * one.steps
    return Cost(ways, steps)


def _part(token: Any, value: Any) -> Cost:
    if token == sre_parse.BRANCH:
        branches = [_sequence(branch) for branch in value[1]]
        return Cost(sum(one.ways for one in branches), 1 + sum(one.steps for one in branches))
    if token in (sre_parse.SUBPATTERN, sre_parse.ASSERT, sre_parse.ASSERT_NOT):
        return _once(value[-1])
    if token == sre_parse.ATOMIC_GROUP:
        return _once(value)
    if token in (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT, sre_parse.POSSESSIVE_REPEAT):
        return _repeated(*value)
    if token in (sre_parse.GROUPREF, sre_parse.GROUPREF_EXISTS):
        raise re.error("references to groups are not supported")
    return Cost(1.0, 1.0)


def _once(inner: Any) -> Cost:
    ways, steps = _sequence(inner)
    return Cost(ways, steps + 1)


def _repeated(least: int, most: int, inner: Any) -> Cost:
    """``inner`` at least ``least`` times: so often it is tried even if it takes no text."""
    ways, steps = _sequence(inner)
    turns = max(least, min(most, LONGEST_TEXT // max(1, inner.getwidth()[0])))
    if not _is_character(inner):
        steps += REPETITION
    return Cost(_powers(ways, least, turns), REPETITION + (steps * _powers(ways, 0, turns - 1) if turns else 0))


def _is_character(parsed: Any) -> bool:
    """Python's engine repeats these without anything to remember."""
    return len(parsed) == 1 and parsed[0][0] in (sre_parse.LITERAL, sre_parse.NOT_LITERAL, sre_parse.IN, sre_parse.ANY)


def _powers(base: float, least: int, most: int) -> float:
    """The sum of ``base ** k`` for k from ``least`` to ``most``; ``base`` is at least 1."""
    if base == 1:
        return most - least + 1
    if (most + 1) * math.log(base) > 100:
        return math.inf
    return (base ** (most + 1) - base**least) / (base - 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
