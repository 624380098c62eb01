"""What is the same on a GPU and in its rehearsal (``tests/rehearsal``): each layout decodes with graphs of its own.

That a graph is replayed only where it was captured is checked in every step of every test that runs as on CUDA.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import requests

from sglang_pat.testing.server import ServerDied

from .conftest import long

CAPTURED = {1, 2, 3, 4, 8}


def test_graphs_are_captured_at_start_and_replayed_in_each_layout(servers, llama):
    server = servers.as_on_cuda(llama)
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    bodies = [{"input_ids": [7 + i, 8], "sampling_params": greedy} for i in range(5)]
    answers = [server.generate(bodies)]
    ranks = {str(server.find_rank_process(rank).pid) for rank in range(2)}
    for tp in (2, 1, 2):
        server.reconfigure(tp)
        answers.append(server.generate(bodies))
    assert all([a["output_ids"] for a in found] == [a["output_ids"] for a in answers[0]] for found in answers)
    for rank in ranks:
        lines = [json.loads(line) for line in (servers.rehearsed / f"{rank}.jsonl").read_text().splitlines()]
        seen = defaultdict(list)
        for line in lines:
            seen[line["event"], line["tp"]].append(line["batch"])
        assert {tp: sorted(seen["capture", tp]) for tp in (1, 2)} == {tp: sorted(CAPTURED) for tp in (1, 2)}
        assert seen["replay", 1] and seen["replay", 2]


def test_what_is_not_captured_runs_without_a_graph(servers, llama):
    server = servers.as_on_cuda(llama)
    server.reconfigure(2)
    greedy = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    answers = server.generate([{"input_ids": [9 + i], "sampling_params": greedy} for i in range(11)])
    assert [len(answer["output_ids"]) for answer in answers] == [4] * 11
    assert server.log_text().count("tp2: steps of more than 8 requests, as now of ") == 1


@pytest.mark.parametrize(
    "mistake,flags,what",
    [
        ("graphs of one layout", (), "a graph of tp=1 is replayed where others are in force: ['KV["),
        long("prefill graphs", (), "a graph of tp=1 is replayed where others are in force: ['KV["),
        long("moved weights", (), "a graph of tp=2 is replayed where others are in force: ['lm_head"),
        long("", ("--pat-weights", "reshard"), "is replayed where others are in force: ['lm_head"),
    ],
)
def test_a_mistake_ends_the_engine(servers, llama, mistake, flags, what):
    """What SGLang's defaults on CUDA would do to an engine that did not take care, without a word.

    The check of outputs finds most of them at start; others are found by a request.
    """
    body = {"input_ids": [7, 8], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
    try:
        server = servers.as_on_cuda(llama, 2, *flags, mistake=mistake)
    except ServerDied as refused:
        assert what in str(refused)
        return
    with pytest.raises(requests.RequestException):
        for tp in (1, 2, 1):
            server.reconfigure(tp)
            server.post("/generate", body).raise_for_status()
    server.process.wait(60)
    assert what in server.log_text(), server.log_text()[-3000:]
