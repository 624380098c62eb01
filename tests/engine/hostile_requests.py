"""Requests to ``/generate`` that nobody should send: hypothesis's strategies, also for others; no test of its own."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Call:
    """One HTTP request.  ``body`` as it is sent: JSON that no client library would make is among it."""

    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"
    query: tuple[tuple[str, str], ...] = ()


EDGES = [-(2**70), -(2**63), -(2**31), -2, -1, 0, 1, 2, 502, 503, 4096, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30]

numbers = st.one_of(
    st.sampled_from(EDGES),
    st.integers(-5, 600),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e-45, 1e-7, 1e38, 1e300, 0.5, 1.0, 16.0]),
)
words = st.one_of(st.text(max_size=8), st.sampled_from(["", "a", "\ud800", "x" * 5000, "(", "[" * 300, "pat-0-0"]))
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
counts = st.sampled_from([0, 1, 3, 1000, 4096, 4097, 5000, 10**6, 2**32 - 2, 2**32])
patterns = st.one_of(
    words,
    st.sampled_from(["a", "[ab]+", "(a+)+$", ".*.*.*x", "(?=a)b", r"(a)\1", "a{3}", "(a{1000}){1000}", "\\d*"]),
    st.builds(
        "{}{}{{{},}}{}".format,
        st.sampled_from(["", "(.+)+", ".*", "a?"]),
        st.sampled_from(["a", ".", "(?=a)", "(?:a|.)", "()"]),
        counts,
        st.sampled_from(["", r"\x00", "+", "?"]),
    ),
    st.builds("(?!a{{{},}}){}".format, counts, st.sampled_from(["a", "(.+)+", ".*"])),
)
schemas = st.one_of(
    words,
    st.sampled_from(['{"type": "object"}', "{}", "[]", "null", "true", '{"type": 5}', '{"$ref": "#"}', "{" * 300]),
    junk.map(json.dumps),
)


def may(plausible: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly what it should be: a request with one thing wrong gets further than one with five."""
    return st.integers(0, 7).flatmap(lambda dice: junk if dice == 7 else plausible)


def some(named: dict[str, st.SearchStrategy]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of these fields."""
    return st.lists(st.sampled_from(sorted(named)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: may(named[name]) for name in names})
    )


sampling = some(
    {
        "max_new_tokens": st.integers(0, 40),
        "min_new_tokens": st.integers(0, 10),
        "n": st.integers(1, 3),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(1, 600),
        "min_p": st.floats(0, 1),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(1e-6, 2),
        "stop": st.lists(words, max_size=3),
        "stop_token_ids": st.lists(st.integers(-2, 600), max_size=6),
        "stop_regex": patterns,
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
        "stream_interval": st.integers(1, 5),
        "sampling_seed": st.integers(0, 2**31),
        "logit_bias": st.dictionaries(st.integers(-1, 503).map(str), numbers, max_size=5),
        "custom_params": st.one_of(st.fixed_dictionaries({"pat_limit": junk}), st.dictionaries(words, junk), junk),
    }
)
lengths = st.fixed_dictionaries({"max_new_tokens": may(st.integers(0, 40))})
grammars = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"regex": patterns}),
    st.fixed_dictionaries({"json_schema": schemas}),
    st.fixed_dictionaries({"ebnf": st.one_of(words, st.sampled_from(['root ::= "a"', "root ::= root", "start: /a/"]))}),
    st.fixed_dictionaries({"structural_tag": schemas}),
    st.dictionaries(st.sampled_from(["regex", "json_schema", "ebnf", "structural_tag"]), junk),
)
parameters = st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, lengths, sampling, grammars)

token_ids = st.lists(st.integers(0, 502), min_size=1, max_size=40)
prompts = st.one_of(
    st.fixed_dictionaries({"input_ids": token_ids}),
    st.fixed_dictionaries({"input_ids": token_ids}),
    st.fixed_dictionaries({"input_ids": st.lists(token_ids, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"text": words}),
    st.fixed_dictionaries({"text": st.lists(words, max_size=3)}),
    st.fixed_dictionaries({}, optional={"input_ids": junk, "text": junk, "input_embeds": junk}),
)
FIELDS = (
    "rid return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs stream "
    "log_metrics return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk modalities "
    "session_params lora_path lora_id custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port "
    "bootstrap_room bootstrap_pair_key decode_tp_size require_reasoning routed_dp_rank disagg_prefill_dp_rank "
    "data_parallel_rank background conversation_id priority extra_key routing_key no_logs custom_labels return_bytes "
    "return_entropy external_trace_header received_time need_wait_for_mm_inputs num_items_assigned max_dynamic_patch "
    "image_data video_data audio_data multi_item_delimiter_indices http_worker_ipc use_audio_in_video unknown"
).split()
PLAUSIBLE = {
    "return_logprob": st.booleans(),
    "logprob_start_len": st.integers(-2, 50),
    "top_logprobs_num": st.integers(-1, 600),
    "token_ids_logprob": st.lists(st.integers(-1, 503), max_size=4),
    "stream": st.booleans(),
    "custom_labels": st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]), max_size=2),
    "extra_key": st.text(string.ascii_letters, max_size=3),
    "session_params": st.fixed_dictionaries({"id": words}),
}
fields = some({name: PLAUSIBLE.get(name, st.one_of(st.none(), words, numbers)) for name in FIELDS})
generate = st.builds(
    lambda prompt, params, more: prompt | {"sampling_params": params} | more,
    prompts, may(st.one_of(parameters, st.lists(parameters, max_size=3))), fields,
)  # fmt: skip


def posted(path: str, bodies: st.SearchStrategy) -> st.SearchStrategy[Call]:
    return bodies.map(lambda body: Call("POST", path, json.dumps(body).encode()))


def unreadable(path: str) -> st.SearchStrategy[Call]:
    """Bodies that are no JSON, or none that anybody would write."""
    bodies = st.one_of(st.binary(max_size=20), st.sampled_from([b"[" * 100_000, b"{", b"null", b'{"a":' * 900]))
    return bodies.map(lambda body: Call("POST", path, body))
