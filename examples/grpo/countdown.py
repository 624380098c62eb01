"""The task: count down.  "50-45=" is answered by "49,48,47,46,45.".

The distances have a tail, and so have the answers.  Tokens are characters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from examples.grpo.task import Task

PAD, EOS = 0, 1
CHARACTERS = "0123456789-=,."
VOCABULARY = 16
"""Tokens: two special ones, and the characters."""

LEAST, MOST, MEAN = 2, 30, 4.0
"""Numbers of an answer: LEAST and an exponential number of mean MEAN more, MOST at most."""
LIMIT = 112
"""Most tokens of an answer; the longest right one has 3 * MOST + 1."""

_CODES = {character: number for number, character in enumerate(CHARACTERS, 2)}


def encode(text: str) -> list[int]:
    """Token ids of characters."""
    return [_CODES[character] for character in text]


def decode(token_ids: list[int]) -> str:
    """Text of the tokens, without EOS; "?" for a token that is no character."""
    known = {code: character for character, code in _CODES.items()}
    return "".join(known.get(token, "?") for token in token_ids if token != EOS)


def make_prompt(problem: str) -> list[int]:
    """Token ids of a problem."""
    return encode(problem + "=")


def draw_task(count: int, tested: int, seed: int, given: Sequence[str] | None = None) -> Task:
    """Problems to train, ``given`` or drawn; and to test, the same for every seed.  None is in both."""
    rng = random.Random("held out")
    held_out = [draw_problem(rng) for _ in range(tested)]
    if given is not None:
        problems, known = list(given), set(given)
        held_out = [problem for problem in held_out if problem not in known] or held_out
    else:
        known, problems, rng = set(held_out), [], random.Random(f"train {seed}")
        while len(problems) < count:
            if (problem := draw_problem(rng)) not in known:
                problems.append(problem)
    return Task(problems=problems, held_out=held_out, make_prompt=make_prompt, decode=decode, verify=verify)


def draw_problem(rng: random.Random) -> str:
    count = min(MOST, LEAST + int(rng.expovariate(1 / MEAN)))
    last = rng.randrange(100 - count)
    return f"{last + count:02d}-{last:02d}"


def solve(problem: str, rng: random.Random | None = None, slips: float = 0.0) -> str:
    """The right answer; or, with ``rng``, one in which each number is wrong with probability ``slips``."""
    number, last = map(int, problem.split("-"))
    numbers: list[str] = []
    while number > last:
        number -= 1
        if rng is not None and rng.random() < slips:
            number = max(last, number + rng.choice((-2, -1, 1)))
        numbers.append(f"{number:02d}")
    return ",".join(numbers) + "."


def verify(problem: str, answer: str) -> float:
    """Reward: 1 if every number is right, else 0."""
    return float(answer == solve(problem))


def check_problem(text: str) -> None:
    """Check a problem.

    Raises:
        ValueError: it is no problem, or its answer would be too long.
    """
    first, dash, last = text.partition("-")
    if not (dash and all(len(one) == 2 and one.isascii() and one.isdecimal() for one in (first, last))):
        raise ValueError(f"{text[:60]!r} is no problem")
    if not 1 <= int(first) - int(last) <= MOST:
        raise ValueError(f"{text[:60]!r} is a distance of {int(first) - int(last)}, must be 1 to {MOST}")
