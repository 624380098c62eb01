"""The task: add up, and write down every sum on the way: "3+5+9+2=" is answered by "8,17,19.".

The number of terms has a tail, and so have the answers.  Tokens are characters.
"""

from __future__ import annotations

import random

PAD, EOS = 0, 1
CHARACTERS = "0123456789+=,."
VOCABULARY = 16
"""Two special tokens, and the characters."""

LEAST, MOST, TAIL = 3, 16, 0.5
"""Terms of a problem: LEAST and an exponential number of rate TAIL more, MOST at most."""
LIMIT = 64
"""Most tokens of an answer; the longest right one has 46."""

_CODES = {character: number for number, character in enumerate(CHARACTERS, 2)}


def encode(text: str) -> list[int]:
    """Token ids.  Raises ValueError: a character that there is no token for."""
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown:
        raise ValueError(f"{text[:60]!r} has {unknown[0]!r}, which is no character of a problem")
    return [_CODES[character] for character in text]


def decode(token_ids: list[int]) -> str:
    return "".join(CHARACTERS[token - 2] for token in token_ids if token > EOS)


def check_problem(text: str) -> None:
    """Raises ValueError: it is no sum, or so long that its answer would be cut."""
    encode(text)
    terms = text.split("+")
    if len(terms) < 2 or not all(terms):
        raise ValueError(f"{text[:60]!r} is no sum")
    if len(solve(text)) >= LIMIT:
        raise ValueError(f"{text[:60]!r} has an answer of {len(solve(text))} characters, may have {LIMIT - 1}")


def draw_problem(rng: random.Random) -> str:
    terms = min(MOST, LEAST + int(rng.expovariate(TAIL)))
    return "+".join(str(rng.randrange(1, 10)) for _ in range(terms))


def solve(problem: str, rng: random.Random | None = None, slips: float = 0.0) -> str:
    """The right answer; or, with ``rng``, one in which each sum is wrong with probability ``slips``."""
    first, *terms = map(int, problem.split("+"))
    total, sums = first, list[str]()
    for term in terms:
        total += term
        if rng is not None and rng.random() < slips:
            total = max(1, total + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10)))
        sums.append(str(total))
    return ",".join(sums) + "."


def verify(problem: str, answer: str) -> float:
    """1 if every sum is right, else 0."""
    return float(answer == solve(problem))
