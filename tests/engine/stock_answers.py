"""What stock SGLang answers to the requests of several test files, asked all at once; and the comparison with it.

No test of its own.  :data:`tests.engine.conftest.stock` is the fixture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_pat.testing.server import Server

from . import features
from .streams import LENGTH, Body, Stream, body

TIE = 1e-5
"""Where stock's two best logprobs are this close, either token is right, and what follows is not compared."""
TIES = 3
"""More ties than that, in some 30,000 tokens, are no accident."""
LOGPROB_ERROR = 1e-4
"""Largest difference of a returned logprob to the static layout's (float32; logits have a spread of 4)."""

LOWEST = -(2 - 2**-23) * 2.0**127
"""The lowest float32."""

CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Say something long, please."}],
    "temperature": 0,
    "max_tokens": LENGTH,
    "ignore_eos": True,
    "seed": 1,
}
COMPLETION = {"model": "default", "prompt": "once upon a time", "temperature": 0} | {
    "max_tokens": LENGTH,
    "ignore_eos": True,
}

OPENAI = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}

KNOWN: list[Body] = []
"""Requests of the test files whose answers are asked of stock SGLang, all at once, while its server is up."""


def known(*requests: Body) -> list[Body]:
    KNOWN.extend(requests)
    return list(requests)


@dataclass(frozen=True)
class Stock:
    """What stock SGLang answers.

    Attributes:
        bodies: requests of the feature batch, by feature; ``expected``: their answers, each on its own.
        answers: answers to :data:`KNOWN`, by request.
        best: asks for the two best ``(logprob, token)`` of each step of a request of either.
        openai: texts of :data:`OPENAI`, by path.
        ties: where an answer went another way at a tie.
    """

    bodies: dict[str, Body]
    expected: dict[str, dict[str, Any]]
    answers: dict[str, dict[str, Any]]
    best: Callable[[Body], list[Any]]
    openai: dict[str, str]
    ties: list[str] = field(default_factory=list)

    def list_answers(self, requests: Sequence[Body]) -> list[dict[str, Any]]:
        return [self.answers[json.dumps(request)] for request in requests]

    def same(self, ours: dict[str, Any], wanted: dict[str, Any], request: Body, where: str = "") -> bool:
        """Whether the tokens are equal; False after a tie, ``AssertionError`` if they differ otherwise."""
        mine, theirs = ours["output_ids"], wanted["output_ids"]
        at = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            assert len(mine) == len(theirs), where
            return True
        first, second = self.best(request)[at][:2]
        line = f"token {at} is {mine[at]}, stock's best are {first} and {second}; {where}"
        tied = second[0] is not None and first[0] - second[0] <= TIE
        assert tied and {mine[at], theirs[at]} == {first[1], second[1]}, line
        self.ties.append(line)
        return False

    def check(self, answers: Sequence[dict[str, Any]], requests: Sequence[Body]) -> None:
        """Assert that these are stock's answers to requests from :data:`KNOWN`."""
        for answer, wanted, request in zip(answers, self.list_answers(requests), requests, strict=True):
            self.same(answer, wanted, request)


def generate_apart(server: Server, requests: Sequence[Body]) -> list[dict[str, Any]]:
    """Answers of all, in three batches.

    In stock SGLang with llguidance a free request can inherit the vocabulary mask of a constrained one next to it; and
    it dies of a batch in which only some ask for the logprobs of given tokens.
    """

    def kind(request: Body) -> tuple[bool, bool]:
        constrained = not request["sampling_params"].keys().isdisjoint(("regex", "json_schema"))
        return constrained, "token_ids_logprob" in request

    answers: dict[int, dict[str, Any]] = {}
    for one in sorted(set(map(kind, requests))):
        chosen = [i for i, request in enumerate(requests) if kind(request) == one]
        answers |= zip(chosen, server.generate([requests[i] for i in chosen]), strict=True)
    return [answers[i] for i in range(len(requests))]


def ask(get: Callable[[], Server]) -> Stock:
    """Ask the stock server, which ``get`` gets, now and later.  Of :data:`KNOWN` it is asked what the test files that
    are imported have put there."""
    server = get()
    plain = server.generate([body(seed) for seed in range(5)])
    bodies = features.feature_bodies(lambda seed: plain[seed]) | features.token_ids_bodies()
    # A batch of its own, or the order of classes in which SGLang applies penalties might depend on the others.
    alone = [name for name in bodies if name in features.PENALISED]
    rest = [name for name in bodies if name not in features.PENALISED]
    expected = dict(zip(rest, generate_apart(server, [bodies[name] for name in rest]), strict=True))
    expected |= {name: server.generate([bodies[name]])[0] for name in alone}
    answers = {json.dumps(b): answer for b, answer in zip(KNOWN, generate_apart(server, KNOWN), strict=True)}
    choices = {path: server.post(path, request).json()["choices"][0] for path, request in OPENAI.items()}
    texts = {path: c["text"] if "text" in c else c["message"]["content"] for path, c in choices.items()}
    return Stock(bodies, expected, answers, lambda request: two_best(get(), request), texts)


def two_best(server: Server, request: Body) -> list[Any]:
    """The two best ``(logprob, token, text)`` of each step of the stock server's answer."""
    more = {"return_logprob": True, "top_logprobs_num": 2}
    asked = {name: value for name, value in request.items() if name != "token_ids_logprob"} | more
    return server.post("/generate", asked).json()["meta_info"]["output_top_logprobs"]


def check_answer(stock: Stock, stream: Stream, name: str) -> None:
    if name in features.LIVE:
        assert len(stream.switched_at) >= 2, f"{name} ended too early to see a switch up and one down"
    check_whole(stock, stream.answer, name, f"switches soon after {stream.switched_at}")


def check_whole(stock: Stock, answer: dict[str, Any], name: str, where: str = "") -> None:
    """Assert that all of this answer is stock's to the request ``name``."""
    wanted = stock.expected[name]
    if not stock.same(answer, wanted, stock.bodies[name], f"{name}; {where}"):
        return
    assert answer["text"] == wanted["text"]
    assert answer["meta_info"]["finish_reason"] == wanted["meta_info"]["finish_reason"]
    assert answer["meta_info"]["prompt_tokens"] == wanted["meta_info"]["prompt_tokens"]
    check_logprobs(answer["meta_info"], wanted["meta_info"])


def near(value: float | None, expected: float | None) -> bool:
    """Whether logprobs are equal but for rounding; SGLang has None for -inf, or its lowest float where a request of the
    batch samples."""
    value, expected = (LOWEST if one is None else one for one in (value, expected))
    return abs(value - expected) <= LOGPROB_ERROR


def check_logprobs(meta: dict[str, Any], wanted: dict[str, Any], close: Callable[[float, float], bool] = near) -> None:
    what = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
    kinds = [f"{side}_{kind}" for side in ("input", "output") for kind in what]
    for kind in kinds:
        assert (kind in meta) == (kind in wanted), kind
        if kind not in wanted:
            continue
        assert len(meta[kind]) == len(wanted[kind]), kind
        for position, (mine, theirs) in enumerate(zip(meta[kind], wanted[kind], strict=True)):
            where = f"{kind} at {position}"
            single = bool(theirs) and not isinstance(theirs[0], list)
            check_entries([mine] if single else mine, [theirs] if single else theirs, where, close)


def check_entries(mine: list[Any], theirs: list[Any], where: str, close: Callable[[float, float], bool]) -> None:
    """Lists of (logprob, token, text); the order of near ties is free."""
    if not theirs:
        assert not mine, where
        return
    assert len(mine) == len(theirs), where
    assert {entry[1] for entry in mine} == {entry[1] for entry in theirs}, where
    values = {entry[1]: entry[0] for entry in theirs}
    for value, token, _ in mine:
        # The first prompt token has no logprob.
        assert value == values[token] or close(value, values[token]), f"{where}: {mine}, not {theirs}"
