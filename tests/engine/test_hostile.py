"""No request ends the engine, and none leaves anything behind."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import requests

from sglang_pat.testing.server import Server

from .hostile import ENDLESS, GAVE_UP, NO_ANSWER, STREAM_BROKEN_OFF, drawn, memory, send, walked
from .hostile_pat import calls
from .schedule_runs import check_idle

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
PLAIN = {"input_ids": [7, 99, 12, 300, 8], "sampling_params": GREEDY}

KNOWN: dict[str, list[int]] = {}
"""By server."""

GROWTH_BYTES = 96 << 20
"""Memory that all processes together may gain over the second half of a soak."""


@pytest.fixture
def known(server) -> list[int]:
    """Tokens of the plain request, before anything else was asked (other tests compare with stock SGLang's)."""
    return KNOWN.setdefault(server.url, server.generate([PLAIN])[0]["output_ids"])


def sound(server: Server, known: list[int]) -> None:
    """It answers a plain request as ever, in both layouts, and holds nothing."""
    assert server.process.poll() is None, server.log_text()[-4000:]
    for tp in (2, 1):
        server.reconfigure(tp)
        assert server.generate([PLAIN])[0]["output_ids"] == known
    check_idle(server)


GRAMMAR_AGAINST_LENGTH = {"regex": "a", "min_new_tokens": 3, "temperature": 1.0, "max_new_tokens": 8}

CRASHES = {
    "a float for a length": {"max_new_tokens": 16.0},
    "a truth value for a length": {"max_new_tokens": True},
    "a limit of 100 bits": {"custom_params": {"pat_limit": 10**30}},
    "a limit of 64 bits": {"custom_params": {"pat_limit": 2**63}},
    "a truth value for a limit": {"custom_params": {"pat_limit": True}},
    "a temperature that is no number": {"temperature": float("nan")},
    "an infinite bias": {"logit_bias": {"5": float("inf")}, "temperature": 1.0},
    "every token forbidden": {"logit_bias": {str(i): float("-inf") for i in range(503)}, "temperature": 1.0},
    "every token of a grammar forbidden": {"regex": "a", "logit_bias": {"73": float("-inf")}, "temperature": 1.0},
    "a grammar that ends before it may": GRAMMAR_AGAINST_LENGTH,
    "a grammar without an end": {"ebnf": "root ::= root"},
    "a schema that is no text": {"json_schema": {"type": "object"}},
    "stop tokens beside a least length": {"stop_token_ids": [10**7, -4], "min_new_tokens": 2},
    "top_k of 32 bits": {"top_k": 2**31, "temperature": 1.0},
    "a least length of 32 bits": {"min_new_tokens": 2**31, "max_new_tokens": None},
    "no tokens between two chunks": {"stream_interval": 0},
    "a seed of 70 bits": {"sampling_seed": 2**70},
    "a pattern that takes for ever": {"stop_regex": "(a+)+$"},
    "a pattern that takes for ever, and wants more than there is": {"stop_regex": r"(.+)+\x00(?!a{5000,})"},
    "patterns that take for ever together": {"stop_regex": [r".*.{0,2}\x00"] * 1024},
}


@pytest.mark.parametrize("name", CRASHES)
def test_parameters_that_may_end_the_engine(server, known, name):
    # As text: what JSON does not know, Python's own reader takes.
    bodies = [PLAIN | more | {"sampling_params": GREEDY | CRASHES[name]} for more in ({}, {"stream": True})]
    answers = [requests.post(f"{server.url}/generate", data=json.dumps(body), timeout=300) for body in bodies]
    assert {answer.status_code for answer in answers} <= {200, 400}, answers[0].text
    assert server.generate([PLAIN])[0]["output_ids"] == known


@pytest.mark.parametrize(
    "change",
    [
        {"custom_labels": {"a": "b"}},
        {"input_ids": [-1]},
        {"input_ids": [10**6]},
        {"input_ids": [[]]},
        {"token_ids_logprob": [10**6], "return_logprob": True},
        {"top_logprobs_num": 10**6, "return_logprob": True},
        {"logprob_start_len": -5, "return_logprob": True},
        {"extra_key": ["a"]},
        {"session_params": {"id": [1]}},
        {"positional_embed_overrides": [1]},
        {"http_worker_ipc": "ipc:///tmp/nobody"},
        {"rid": "HEALTH_CHECK_1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fields_that_may_end_the_engine(server, known, change):
    answer = server.post("/generate", PLAIN | change, timeout=300)
    assert answer.status_code in (200, 400), answer.text
    assert server.generate([PLAIN])[0]["output_ids"] == known


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/start_expert_distribution_record", None),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["b"], "shapes": [[1]]}),
        ("/send_weights_to_remote_instance", {"master_address": "a", "ports": "b"}),
    ],
)
def test_control_requests_that_may_end_the_engine(server, known, path, body):
    assert server.post(path, body, timeout=300).status_code < 500
    sound(server, known)


def test_what_was_dropped_is_counted(server):
    def count() -> float:
        lines = server.get("/metrics").text.splitlines()
        name = 'sglang_pat_dropped_messages_total{kind="ExpertDistributionReq"}'
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    before = count()
    server.post("/start_expert_distribution_record")
    assert count() == before + 2, "one on each rank"


def answered(counts: Counter) -> None:
    """Every client of ours had a whole answer, but where it may wait for ever."""
    print(sorted(counts.items(), key=str))
    assert not {
        path: n for (path, status), n in counts.items() if status == NO_ANSWER and path not in STREAM_BROKEN_OFF
    }
    assert not {path: n for (path, status), n in counts.items() if status == GAVE_UP and path not in ENDLESS}


def reached(counts: Counter) -> None:
    """Each path of ours took requests, and refused some."""
    paths = ("/generate", "/pat/round", "/pat/schedule", "/pat/reconfigure")
    assert not [(path, status) for path in paths for status in (200, 400) if not counts[path, status]]


def test_own_generator(server, known):
    def after(counts: Counter) -> None:
        sound(server, known)

    counts = send(server, calls(300, 1, drawn), after)
    answered(counts)
    reached(counts)
    # None of these answers says that something is broken in the server.
    assert not {key: n for key, n in counts.items() if key[1] >= 500}


def test_schema(server, known):
    def after(counts: Counter) -> None:
        sound(server, known)

    answered(send(server, walked(server.url, 200, 1), after))


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_soak(server, known):
    """Ten thousand, and no process grows without end."""
    sizes: list[int] = []

    def after(counts: Counter) -> None:
        sound(server, known)
        sizes.append(memory(server))

    own = calls(6000, 2, drawn)
    schema = walked(server.url, 4000, 2)
    mixed = [call for pair in zip(own[:4000], schema, strict=True) for call in pair] + own[4000:]
    assert len(mixed) == 10_000
    counts = send(server, mixed, after)
    answered(counts)
    reached(counts)
    half = sizes[len(sizes) // 2]
    assert sizes[-1] - half < GROWTH_BYTES, [size >> 20 for size in sizes[:: max(1, len(sizes) // 20)]]


def test_clients_that_go_away_leave_nothing(server, known):
    for change in ({}, {"sampling_params": GREEDY | {"max_new_tokens": 2000}}, {"input_ids": [-1]}):
        with requests.post(server.url + "/generate", json=PLAIN | {"stream": True} | change, stream=True) as answer:
            assert answer.status_code == 200  # of the stream; nobody reads on
    sound(server, known)
