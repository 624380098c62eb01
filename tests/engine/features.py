"""One request for each feature of generation, and how they are streamed across switches; no test of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_pat.testing.server import Server

from .streams import Body, Stream, body, stream_across

ITEMS = 27
CHOICES = ["red", "green", "blue", "grey"]
SCHEMA = json.dumps({"type": "array", "items": {"enum": CHOICES}, "minItems": ITEMS, "maxItems": ITEMS})
NO_BLANKS = {str(token): -100.0 for token in (6, 7, 8)}
"""Newline, tab and space: JSON allows any number of them."""
REGEX = r"([a-f]{3}-){36}z"

LIVE = set(
    "plain stop_token_ids stop no_stop_trim logit_bias logit_bias_up min_new_tokens min_new_tokens_stop "
    "frequency_penalty presence_penalty repetition_penalty several_penalties regex json_schema "
    "logprobs input_logprobs logprobs_penalty token_ids_logprob_0 token_ids_logprob_1 token_ids_logprob_2".split()
)
"""Features whose requests must have lived through at least one switch up and one down."""

FEATURES = sorted(LIVE | {"eos_ends"})
PENALISED = {"frequency_penalty", "presence_penalty", "repetition_penalty", "several_penalties", "logprobs_penalty"}


def feature_bodies(plain: Callable[[int], dict[str, Any]]) -> dict[str, Body]:
    """One request for each feature; ``plain(seed)`` is the unconstrained answer to ``prompt(seed)``."""
    stop_token = find_fresh_token(plain(2)["output_ids"], 125)
    stop_text = fresh_text(plain(3)["text"], 560)
    frequent = max(set(plain(4)["output_ids"]), key=plain(4)["output_ids"].count)
    return {
        "plain": body(1),
        "stop_token_ids": body(2, stop_token_ids=[stop_token], ignore_eos=False),
        "stop": body(3, stop=[stop_text]),
        "no_stop_trim": body(3, stop=[stop_text], no_stop_trim=True),
        "logit_bias": body(4, logit_bias={str(frequent): -100.0}),
        "logit_bias_up": body(4, logit_bias={"77": 5.0}),
        # EOS is very likely here, and must come neither before 130 tokens nor much later.
        "min_new_tokens": body(5, min_new_tokens=130, ignore_eos=False, logit_bias={"3": 12.0}),
        # Without the end that only the generation config names, which stock SGLang does not hold back.
        "min_new_tokens_stop": body(
            2, min_new_tokens=160, stop_token_ids=[stop_token], ignore_eos=False, logit_bias={"5": -100.0}
        ),
        "frequency_penalty": body(6, frequency_penalty=0.7),
        "presence_penalty": body(7, presence_penalty=1.5),
        "repetition_penalty": body(8, repetition_penalty=1.3),
        # Not with repetition_penalty: stock SGLang applies its penalties in the order of a set of classes, another
        # one in every process, and multiplying does not commute with adding.
        "several_penalties": body(9, frequency_penalty=0.4, presence_penalty=0.9, min_new_tokens=66),
        "regex": body(10, regex=REGEX, ignore_eos=False),
        "json_schema": body(11, tokens=360, json_schema=SCHEMA, ignore_eos=False, logit_bias=NO_BLANKS),
        "logprobs": body(12, return_logprob=True, top_logprobs_num=3),
        "input_logprobs": body(15, return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
        "logprobs_penalty": body(13, return_logprob=True, frequency_penalty=0.5),
        "eos_ends": body(14, ignore_eos=False, logit_bias={"3": 3.0}),
    }


def token_ids_bodies() -> dict[str, Body]:
    fields = dict(return_logprob=True, logprob_start_len=5)
    return {
        f"token_ids_logprob_{seed}": body(seed, **fields, top_logprobs_num=seed, token_ids_logprob=[10, 90 + seed])
        for seed in range(3)
    }


def find_fresh_token(ids: list[int], after: int) -> int:
    """The first token from position ``after`` on that did not occur before."""
    return next(token for i, token in enumerate(ids) if i >= after and token not in ids[:i])


def fresh_text(text: str, after: int) -> str:
    """Six characters from position ``after`` on that did not occur before."""
    return next(text[i : i + 6] for i in range(after, len(text)) if text.index(text[i : i + 6]) == i)


def shorten(request: Body) -> Body:
    sampling = request["sampling_params"] | {"max_new_tokens": 8}
    if "min_new_tokens" in sampling:
        sampling["min_new_tokens"] = 4
    return request | {"sampling_params": sampling}


async def stream_features(server: Server, bodies: dict[str, Body]) -> dict[str, Stream]:
    # Once without switches: on each rank SGLang compiles for seconds when a penalty comes for the first time.
    await server.generate_async([shorten(b) for b in bodies.values() for _ in range(2)])
    return dict(zip(bodies, await stream_across(server, list(bodies.values())), strict=True))
