"""Routing replay: of every token of a request that lived through switches the experts are known, and stock SGLang's."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_pat.testing.server import Server

from . import rollout_calls
from .conftest import FORGETS_RETRACTIONS, fault, long, make_model
from .streams import NEVER_ENDS, Body, body, check_idle, hold, stream_across, switch, through, tokens

FLAG = "--enable-return-routed-experts"


@pytest.fixture(scope="session")
def model() -> Path:
    return make_model("qwen3_moe")


@pytest.fixture(scope="session")
def stock(servers, model):
    """What stock SGLang answers, one request after the other: none finds a part of another one in the tree."""

    def answer(bodies: list[Body]) -> list[dict[str, Any]]:
        return servers.get(model, FLAG, "--disable-radix-cache", max_total_tokens=65536).generate(bodies)

    return answer


@pytest.fixture
def server(servers, model) -> Server:
    """Two ranks.  Six decode at most, and pieces of prompts are short."""
    flags = ("--max-running-requests", "6", "--chunked-prefill-size", "64")
    return servers.adaptive(model, 2, FLAG, *flags)


def ask(seed: int, count: int = 100, **fields: Any) -> Body:
    return body(seed, count, **fields) | {"return_routed_experts": True}


def read(experts: bytes, kind: type = np.int32) -> np.ndarray:
    """``[rows, layers, experts per token]``, in the order of their numbers."""
    return np.sort(np.frombuffer(experts, kind).reshape(-1, 2, 2), axis=-1)


def read_experts(answer: dict[str, Any]) -> np.ndarray:
    return read(base64.b64decode(answer["meta_info"]["routed_experts"]))


def check_same(answers: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert tokens(answers) == tokens(wanted)
    for answer, want in zip(answers, wanted, strict=True):
        got, known = read_experts(answer), read_experts(want)
        rows = want["meta_info"]["prompt_tokens"] + len(want["output_ids"]) - 1
        assert got.shape == known.shape == (rows, 2, 2)
        assert not (differ := np.flatnonzero((got != known).any(axis=(1, 2)))).size, differ


def test_switches_carry_them(server, stock):
    """Some ask and some do not; two begin like others, which have the same prompt."""
    bodies = [ask(i, 150) for i in range(3)] + [ask(0, 120), ask(1, 140)]
    bodies += [{name: value for name, value in ask(1, 150).items() if name != "return_routed_experts"}]
    answers, records = through(server, bodies)
    assert all(record["migrated"] == 6 for record in records), records
    assert len({row.tobytes() for answer in answers[:5] for row in read_experts(answer)}) > 50, "experts vary"
    assert "routed_experts" not in answers.pop()["meta_info"]
    check_same(answers, stock(bodies[:5]))


async def test_ranks_that_are_lent(server, session, stock):
    bodies = [ask(i, 100) for i in range(4)]
    work = await hold(server, session, bodies, step=20)
    for path in ("/pat/lend_ranks", "/pat/take_back_ranks"):
        assert server.post(path).json()["migrated"] == len(bodies)
        await server.set_schedule(session, {"step": 20, "hold": True})
        await server.wait_for_schedule(session)
    await server.set_schedule(session)
    answers = await asyncio.gather(*work)
    check_same(answers, await asyncio.to_thread(stock, bodies))


def test_prefixes_in_the_tree(server, stock):
    """Whoever begins like a request that came with its KV finds it in the tree, and its experts, too."""
    long = [5 + i * 37 % 490 for i in range(150)]
    first = [ask(i) | {"input_ids": long + [i]} for i in range(2)]
    later = [ask(i, 30) | {"input_ids": long + [9 - i]} for i in range(3)]

    async def run():
        async with server.session() as session:
            work = await hold(server, session, first, step=10)
            for tp in (2, 1, 2):
                await switch(server, session, tp)
            await server.set_schedule(session, {"arrived": 3})
            more = await server.generate_async(later)
            return await asyncio.gather(*work), more

    answers, more = asyncio.run(run())
    assert all(answer["meta_info"]["cached_tokens"] >= 150 for answer in more)
    check_same([*answers, *more], stock(first + later))


def test_requests_that_wait_with_their_kv(server, stock):
    """Twelve merge where six decode; a prompt is in pieces."""
    bodies = [ask(i, 60) for i in range(12)]
    answers, records = through(server, bodies, {15: 2, 40: 1, 60: 2})
    assert any(record["parked"] for record in records), records
    check_same(answers, stock(bodies))
    whole = [ask(i, 20) | {"input_ids": [5 + j * (31 + i) % 490 for j in range(400)]} for i in range(2)]
    answers, records = through(server, whole, {2: 2, 5: 1, 7: 2}, at="batch")
    assert all(record["parked"] for record in records), records
    check_same(answers, stock(whole))


@pytest.mark.parametrize("where", [long("QUIESCE"), "EXCHANGE"])
async def test_a_switch_that_is_aborted(server, session, stock, where):
    bodies = [ask(i) for i in range(4)]
    work = await hold(server, session, bodies, step=10, tp=2)
    with fault(server, f"{where}:1:raise"):
        assert (await server.reconfigure_async(session, 1))[0] == 500
    await server.set_schedule(session, {"step": 20, "tp": 1})
    check_same(await asyncio.gather(*work), await asyncio.to_thread(stock, bodies))


def test_several_responses_turns_and_pieces(server, stock):
    """``n``; from a token on; as a stream; a response of no token."""
    bodies = [ask(1, 80, n=2), ask(2, 90) | {"routed_experts_start_len": 15}, ask(3, 1), ask(4, 90)]
    (first, later, *others), _ = through(server, bodies, {20: 2, 40: 1, 50: 2, 60: 1})
    copies: Any = first  # two answers
    (copy, whole, *known) = stock([ask(1, 80), ask(2, 90), ask(3, 1), ask(4, 90)])
    check_same([*copies, *others], [copy, copy, *known])
    assert (read_experts(later) == read_experts(whole)[15:]).all()
    streams = asyncio.run(stream_across(server, [ask(i, 130) for i in range(2)]))
    check_same([stream.answer for stream in streams], stock([ask(i, 130) for i in range(2)]))
    for wrong in (21, -1, "all"):
        answer = server.post("/generate", ask(1) | {"routed_experts_start_len": wrong})
        assert answer.status_code == 400 and "routed_experts_start_len" in answer.text, answer.text


def test_rounds_return_them(server, stock):
    """A client's rounds; some responses are thrown away, deferred, and started anew."""
    mine = rollout_calls.admitter(*range(8), mode="partial", max_staleness=1)
    sampling = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    rollout_calls.schedule(server, {"arrived": 4, "step": 10, "tp": 2}, {"step": 20, "tp": 1})
    groups, _ = rollout_calls.run_round(server, mine, sampling, version=0)
    groups += rollout_calls.run_round(server, mine, sampling, version=1)[0]
    bodies = [ask(0, 60) | {"input_ids": group.prompt["input_ids"]} for group in groups]
    for group, want in zip(groups, stock(bodies), strict=True):
        for sample in group.list_kept():
            assert sample.output.token_ids == want["output_ids"]
            assert (read(sample.output.routed_experts, np.int16) == read_experts(want)).all()
    check_idle(server)


async def test_requests_that_are_aborted_while_they_wait(server, session, stock):
    """Where six decode ten merge, of which four wait with their KV; a pause has the six wait without.  One asks for the
    rows from a token on."""
    bodies = [ask(i, 120, rid=f"mine-{i}") | {"routed_experts_start_len": 15 * (i == 3)} for i in range(10)]
    work = await hold(server, session, bodies, step=20, tp=2)
    assert server.status()["switches"][-1]["parked"] == 4
    await session.post(f"{server.url}/pause_generation", json={"mode": "retract"})
    await session.post(f"{server.url}/abort_request", json={"abort_all": True})
    await session.post(f"{server.url}/continue_generation", json={})
    await server.set_schedule(session)
    answers = await asyncio.gather(*work)
    wanted = await asyncio.to_thread(stock, [ask(i, 120) for i in range(10)])
    for i, (answer, want) in enumerate(zip(answers, wanted, strict=True)):
        ids = answer["output_ids"]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort" and ids == want["output_ids"][: len(ids)]
        rows = want["meta_info"]["prompt_tokens"] + len(ids) - 1
        assert (read_experts(answer) == read_experts(want)[15 * (i == 3) : rows]).all() and len(ids) >= 20


@pytest.mark.long
def test_retracted_requests(servers, model, stock):
    """Little KV, lavishly given out."""
    flags = (FLAG, "--schedule-conservativeness", "0.1")
    server = servers.adaptive(model, 2, *flags, max_total_tokens=600, env=FORGETS_RETRACTIONS)
    bodies = [ask(i, 120, **NEVER_ENDS) for i in range(12)]
    answers, _ = through(server, bodies, {40: 2, 80: 1, 100: 2})
    assert server.status()["retracted"]
    check_same(answers, stock(bodies))


@pytest.mark.long
def test_an_engine_in_python(servers, model, stock):
    """``routed_case.py``: four ranks, to which everything comes from one, and from which it goes to all."""
    bodies = [ask(i % 6, 110) for i in range(8)]
    given = {"input_ids": [one["input_ids"] for one in bodies], "sampling_params": bodies[0]["sampling_params"]}
    given["return_routed_experts"] = True
    steps = {15: 4, 30: 2, 45: 1, 60: 2, 75: 4, 90: 1}
    found = servers.run("tests.engine.routed_case", str(model), json.dumps(given), json.dumps(steps), seconds=300)
    assert found.returncode == 0, found.stderr[-3000:]
    answers, outputs = map(json.loads, found.stdout.splitlines())
    for (token_ids, rows), want in zip(answers, stock(bodies), strict=True):
        assert token_ids == want["output_ids"]
        assert (read(base64.b64decode(rows)) == read_experts(want)).all()
    wanted = stock([ask(0, 30) | {"input_ids": given} for given, *_ in outputs])
    for (_, token_ids, rows), want in zip(outputs, wanted, strict=True):
        assert token_ids == want["output_ids"]
        assert (read(bytes.fromhex(rows), np.int16) == read_experts(want)).all()


def test_an_engine_without_the_flag_says_so(servers, model):
    answer = servers.adaptive(model, 2).post("/generate", ask(1))
    assert answer.status_code == 400
    assert "return_routed_experts: not without --enable-return-routed-experts" in answer.text
