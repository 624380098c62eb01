"""Every generation feature goes on across switches as if there had been none: same answers as stock SGLang."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from .features import CHOICES, FEATURES, ITEMS, PENALISED, REGEX, stream_features
from .stock_answers import TIES, check_answer
from .streams import Stream


@pytest.fixture(scope="module")
def moved(servers, llama, stock) -> dict[str, Stream]:
    """The answers of an engine that moves KV."""
    return asyncio.run(stream_features(servers.adaptive(llama), stock.bodies))


@pytest.fixture(scope="module")
def recomputed(servers, llama, stock) -> dict[str, Stream]:
    """Answers of an engine that computes the KV again."""
    return asyncio.run(stream_features(servers.adaptive(llama, 2, "--pat-kv", "recompute"), stock.bodies))


@pytest.fixture(scope="module")
def as_on_cuda(servers, llama, stock) -> dict[str, Stream]:
    server = servers.as_on_cuda(llama)
    assert server.get("/server_info").json()["disable_overlap_schedule"] is False
    return asyncio.run(stream_features(server, stock.bodies))


@pytest.mark.parametrize("name", FEATURES)
def test_answer_equals_stock(name, moved, stock):
    check_answer(stock, moved[name], name)


@pytest.mark.long
@pytest.mark.parametrize("name", FEATURES)
def test_recomputed_answer_equals_stock(name, recomputed, stock):
    check_answer(stock, recomputed[name], name)


@pytest.mark.parametrize("name", sorted(set(FEATURES) - PENALISED))
def test_answer_as_on_cuda_equals_stock(name, as_on_cuda, stock):
    """Penalties are left out: with overlap SGLang counts a token for these one step late, or twice when a prefill comes
    in between, so that its own answers differ with what else is in the batch."""
    check_answer(stock, as_on_cuda[name], name)


@pytest.fixture(scope="module")
def alone(servers, llama, stock, as_on_cuda) -> dict[str, Any]:
    """Answers of the server with overlap scheduling to requests with penalties: one at a time, without a switch."""
    server = servers.as_on_cuda(llama)
    return {name: server.generate([stock.bodies[name]])[0] for name in PENALISED}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PENALISED))
def test_with_overlap_penalties_know_nothing_of_switches(name, as_on_cuda, alone, stock):
    """Nor of what else is in the batch (``host/fixes/penalties.py``; a contract test compares one request alone with
    SGLang's)."""
    check_answer(replace(stock, expected=alone), as_on_cuda[name], name)


@pytest.mark.parametrize("name", FEATURES)
def test_stream_has_no_gap_and_no_repeat(name, moved):
    chunks = moved[name].chunks
    for last, chunk in pairwise(chunks):
        assert chunk["text"].startswith(last["text"])
        assert chunk["output_ids"][: len(last["output_ids"])] == last["output_ids"]
        assert chunk["meta_info"]["completion_tokens"] >= last["meta_info"]["completion_tokens"]
    assert len(chunks[-1]["output_ids"]) == chunks[-1]["meta_info"]["completion_tokens"]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_grammars_hold(moved):
    assert re.fullmatch(REGEX, moved["regex"].answer["text"])
    items = json.loads(moved["json_schema"].answer["text"])
    assert len(items) == ITEMS and set(items) <= set(CHOICES)


def test_ties_are_rare(stock):
    print(*stock.ties, sep="\n")
    assert len(stock.ties) <= TIES
