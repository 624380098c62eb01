"""Every option of a request beside every other one, in one batch and through switches: each answer is that of the same
request alone."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from sglang_pat.testing.server import Server

from . import mixtures
from .conftest import SCHEDULERS, long
from .schedule_runs import tie
from .stock_answers import LOGPROB_ERROR, check_logprobs
from .streams import Body, Stream, check_idle, open_session, read

STEPS = (3, 8, 15, 24)
"""Decode steps after which it switches up and down."""

OF_THE_RUN = {
    "id",
    "e2e_latency",
    "cached_tokens",
    "cached_tokens_details",
    "tp_from_token",
    "weight_updates",
    "response_sent_to_client_ts",
}
"""What an answer says of its way through the engine."""


@pytest.fixture(params=[long("plain"), "overlap"])
def server(request, servers, llama) -> Server:
    """Prompts of a batch come in pieces."""
    flags = "--enable-return-hidden-states --enable-custom-logit-processor --chunked-prefill-size 64".split()
    return servers.adaptive(llama, 2, *flags, *SCHEDULERS[request.param])


async def ask(server: Server, session, request: Body) -> list[dict[str, Any]]:
    if request.get("stream"):
        stream = Stream()
        await read(server, session, request, stream)
        return [stream.answer]
    answer = await server.generate_one(session, request)
    return answer if isinstance(answer, list) else [answer]


async def together(server: Server, requests: list[Body]) -> list[list[dict[str, Any]]]:
    async with open_session() as session:
        entries = [
            {"tp": tp, "arrived": len(requests), "step": step} for tp, step in zip((2, 1, 2, 1), STEPS, strict=True)
        ]
        await server.set_schedule(session, *entries)
        before = server.status()["num_switches"]
        answers = await asyncio.gather(*(ask(server, session, request) for request in requests))
        status = server.status()
        switches = status["switches"][before - status["num_switches"] :]
        assert [record["requests"] > 0 for record in switches[:3]] == [True] * 3, "a switch up, one down, one up"
        await server.set_schedule(session)
        return answers


async def alone(server: Server, requests: list[Body]) -> list[list[dict[str, Any]]]:
    async with open_session() as session:
        return [await ask(server, session, request) for request in requests]


SOAK = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(5, 40)]


@pytest.mark.parametrize("seed", [0, *map(long, range(1, 5)), *SOAK])
def test_each_answer_is_as_alone(server, seed):
    rng = random.Random(seed)
    wanted = mixtures.draw_requests(rng, 16) if seed else mixtures.list_one_of_each(rng)
    requests = [mixtures.request(options, 100 * seed + i) for i, options in enumerate(wanted)]
    mixed = asyncio.run(together(server, requests))
    check_idle(server)
    for options, request, mine, theirs in zip(
        wanted, requests, mixed, asyncio.run(alone(server, requests)), strict=True
    ):
        try:
            assert len(mine) == len(theirs) == options.get("n", 1)
            for one, other in zip(mine, theirs, strict=True):
                check(server, request, one, other)
        except AssertionError as error:
            raise AssertionError(f"{json.dumps(options)}: {error}") from error


def check(server: Server, request: Body, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    meta, wanted = mine["meta_info"], theirs["meta_info"]
    assert meta.keys() == wanted.keys()
    sampling = request["sampling_params"]
    if sampling["temperature"]:
        assert lengths(meta) == lengths(wanted)
        return
    if mine["output_ids"] != theirs["output_ids"]:
        at = next(
            i for i, pair in enumerate(zip(mine["output_ids"], theirs["output_ids"], strict=True)) if len(set(pair)) > 1
        )
        tie(server, request["input_ids"], mine["output_ids"], theirs["output_ids"], at, "in a mixture")
        return
    assert mine["text"] == theirs["text"]
    rest = meta.keys() - OF_THE_RUN - {"hidden_states"}
    assert {name: meta[name] for name in rest if "logprob" not in name} == {
        name: wanted[name] for name in rest if "logprob" not in name
    }
    assert lengths(meta) == lengths(wanted)
    check_logprobs(meta, wanted)
    for at, both in enumerate(zip(meta.get("hidden_states", ()), wanted.get("hidden_states", ()), strict=True)):
        # Of a prompt that was computed in pieces, or partly found in the tree, there are the rows of the rest.
        ours, other = (rows if at else rows[-1] for rows in both)
        assert ours == pytest.approx(other, abs=LOGPROB_ERROR)


def lengths(meta: dict[str, Any]) -> dict[str, int]:
    """Lengths of all that is there by token; of what is about the output, how much more than tokens."""
    lists = {name: value for name, value in meta.items() if isinstance(value, list) and name not in OF_THE_RUN}
    tokens = meta["completion_tokens"]
    others = ("input_", "weight_versions")
    return {name: len(value) - (0 if name.startswith(others) else tokens) for name, value in lists.items()}
