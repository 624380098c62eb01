"""Seeded random schedules of requests and switches; how one is run: ``schedule_runs.py``.  No test of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .streams import GREEDY, NEVER_ENDS

FIRST_ORDINARY_TOKEN = 5
"""The special tokens of the test models are below it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: ``n`` greedy copies of ``max_new_tokens`` tokens after ``prompt``."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    n: int = 1
    may_end: bool = False
    """SGLang may give out room that such a request does not need; 0.5.23 keeps it for those that ignore ends."""

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What the answer of a schedule's request depends on."""
        return self.prompt, self.max_new_tokens

    def body(self, **more) -> dict:
        params = GREEDY | {"max_new_tokens": self.max_new_tokens}
        if self.n > 1:
            params["n"] = self.n
        if self.may_end:
            params |= NEVER_ENDS
        return {"input_ids": list(self.prompt), "sampling_params": params, **more}


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch to degree ``tp`` at decode step ``at``; ``batch``: at that step of any kind, among the prefills.

    ``stride``: ranks are lent or taken back instead; ``tp`` is the degree that is in force then.
    """

    at: int
    tp: int
    batch: int | None = None
    stride: int | None = None

    def entry(self, since: int = 0) -> dict:
        """The entry for ``/pat/schedule``, counted from decode step ``since``."""
        point = {"step": self.at - since} if self.batch is None else {"batch": self.batch}
        return ({"tp": self.tp} if self.stride is None else {"stride": self.stride}) | point


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a seed stands for.

    Attributes:
        start_tp: degree at the beginning.
        pacer: a request that lives through all switches.
        first, second: requests sent with the pacer, and at decode step ``second_at``.
        together: the first ones begin together; else each as it comes.
        switches: in order.
    """

    seed: int
    start_tp: int
    pacer: Request
    first: tuple[Request, ...]
    second: tuple[Request, ...]
    second_at: int
    together: bool
    switches: tuple[Switch, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        return (self.pacer, *self.first, *self.second)


def make(
    seed: int,
    degrees: Sequence[int],
    *,
    name: str = "",
    vocab: int = 503,
    max_batch: int = 32,
    max_prompt: int = 600,
    max_new_tokens: int = 100,
    strides: Sequence[int] = (),
    repeats: float = 0.0,
) -> Schedule:
    """The schedule of ``seed`` and ``name``.

    Args:
        max_batch: counts the copies of ``n > 1`` too.
        strides: with which ranks are lent, in half of the switches; those in between are of what is left, or take them
            back for a degree that needs all.
        repeats: share of the requests that have the prompt of an earlier one.
    """
    rng = random.Random(f"{name} {seed}")

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_ORDINARY_TOKEN, vocab) for _ in range(count))

    prefixes = [tokens(rng.randint(1, max_prompt // 2)) for _ in range(rng.randint(0, 2))]

    def request(budget: int) -> Request:
        longest = rng.choice((8, max_prompt // 4, max_prompt))
        prompt = tokens(rng.randint(1, longest))
        if prefixes and rng.random() < 0.6:
            prefix = rng.choice(prefixes)
            # Now and then the prefix alone: a prompt that another one contains.
            prompt = prefix if rng.random() < 0.15 else (prefix + prompt)[:max_prompt]
        if repeats and requests and rng.random() < repeats:
            prompt = rng.choice(requests).prompt
        n = rng.randint(2, min(4, budget)) if budget > 1 and rng.random() < 0.1 else 1
        new = 1 if rng.random() < 0.08 else rng.randint(1, max_new_tokens)
        return Request(prompt=prompt, max_new_tokens=new, n=n)

    requests: list[Request] = []
    size = round(max_batch ** rng.random())
    pacer = Request(prompt=tokens(rng.randint(1, 40)), max_new_tokens=rng.randint(max_new_tokens, 2 * max_new_tokens))
    while (left := size - 1 - sum(r.n for r in requests)) > 0:
        requests.append(request(left))
    waves = rng.randint(0, len(requests))
    last = pacer.max_new_tokens // 2
    # At 0 prefills are under way, or none has begun; the last one finds the pacer decoding.
    times = sorted(0 if rng.random() < 0.3 else rng.randint(1, last) for _ in range(rng.randint(0, 5)))
    times.append(rng.randint(max([1, *times]), last))
    degree = start = rng.choice(degrees)
    switches, batch, lent = [], 0, 1
    for at in times:
        stride = rng.choice([s for s in (1, *strides) if s != lent]) if strides and rng.random() < 0.5 else None
        if stride is None:
            degree = rng.choice([d for d in degrees if d != degree])
            lent = lent if degree * lent <= degrees[-1] else 1
        else:
            lent, degree = stride, min(degree, degrees[-1] // stride)
        batch += rng.choice((0, 1, 1, 2, 4))
        switches.append(Switch(at=at, tp=degree, batch=batch if at == 0 else None, stride=stride))
    # Half of the time the second wave comes in the middle of a switch.
    second_at = rng.choice(times) if rng.random() < 0.5 else rng.randint(0, last)
    return Schedule(
        seed=seed,
        start_tp=start,
        pacer=pacer,
        first=tuple(requests[:waves]),
        second=tuple(requests[waves:]),
        second_at=second_at,
        together=rng.random() < 0.5,
        switches=tuple(switches),
    )
