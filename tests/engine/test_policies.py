"""Policies that predict, in the engine: they switch in a long-tail batch, lose nothing, and log what they saw."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from sglang_pat.predict import profile as profiles
from sglang_pat.replay import read_schedule

from . import streams
from .made_up import make_profile
from .streams import tokens, wait_for_layout

LENGTHS = [12 + 3 * i for i in range(12)]
"""Response lengths of the body of a batch, tokens; its tail goes on until the test has seen the merge."""

TAIL = 4
LIMIT = 4000


@pytest.fixture(scope="module")
def profile(deployment, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "llama.json"
    profiles.save(make_profile(deployment), path)
    return path


def body(seed: int, length: int, rid: str) -> dict:
    """Lengths are fixed by ``max_new_tokens``; policies are told the same limit for all."""
    return streams.body(seed, length, rid=rid, custom_params={"pat_limit": LIMIT})


def bodies(name: str) -> tuple[list[dict], list[dict]]:
    """The body of a batch and its tail; request ids begin with ``name``."""
    short = [body(seed, length, f"{name}-{seed}") for seed, length in enumerate(LENGTHS)]
    return short, [body(20 + i, 3500, f"{name}-tail-{i}") for i in range(TAIL)]


@pytest.fixture(scope="module")
def expected(servers, llama) -> list[list[int]]:
    """Answers of the body, then the beginning of the tail's."""
    short, tail = bodies("stock")
    for request in tail:
        request["sampling_params"]["max_new_tokens"] = 700
    return tokens(servers.stock(llama).generate(short + tail))


async def drain(server, name: str, merged: Callable[[], Awaitable[None]]) -> list[list[int]]:
    """A batch: the body ends, ``merged`` returns, the tail is aborted; all outputs."""
    short, tail = bodies(name)
    async with server.session() as session:
        work = [asyncio.ensure_future(server.generate_one(session, request)) for request in short + tail]
        await asyncio.gather(*work[: len(short)])
        await merged()
        for request in tail:
            async with session.post(server.url + "/abort_request", json={"rid": request["rid"]}) as response:
                assert response.status == 200
        return [(await answer)["output_ids"] for answer in work]


def same(outputs: list[list[int]], expected: list[list[int]]) -> None:
    assert outputs[: len(LENGTHS)] == expected[: len(LENGTHS)]
    for mine, theirs in zip(outputs[len(LENGTHS) :], expected[len(LENGTHS) :], strict=True):
        common = min(len(mine), len(theirs))
        assert common and mine[:common] == theirs[:common]


@pytest.fixture(scope="module", params=["survival", pytest.param("pat", marks=pytest.mark.soak)])
def drained(request, servers, llama, expected, profile, tmp_path_factory):
    """(policy, its server, its log) after two batches with a tail."""
    policy, log = request.param, tmp_path_factory.mktemp("log") / "decisions.jsonl"
    believed = f"--pat-profile {profile} --pat-profile-as-is"
    flags = f"--tp 1 --dp 2 --adaptive-tp {believed} --pat-policy {policy} --pat-log {log}"
    server = servers.get(llama, *flags.split())

    async def merged() -> None:
        await wait_for_layout(server.status, 2)

    for number in range(2):
        same(asyncio.run(drain(server, f"{policy}{number}", merged)), expected)
        wait_for_base(server)  # and so all ends are in the log
    return policy, server, log


def test_switches_in_a_long_tail_and_loses_nothing(drained, profile):
    policy, server, log = drained
    assert server.status()["policy"] == policy
    switches = server.status()["switches"]
    live = [s for s in switches if s["to_tp"] == 2 and s["requests"] and not s["error"]]
    assert live and all(s["reason"] == policy for s in live)
    assert len(switches) <= 12, "flapping"
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events.count("counting") == 1 and events.index("counting") < events.index("length")
    assert events.count("length") == 2 * (len(LENGTHS) + TAIL) and "decision" in events
    ran = subprocess.run(
        [sys.executable, "-m", "sglang_pat.replay", "--log", str(log), "--profile", str(profile)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_its_decisions_can_be_repeated_on_another_engine(drained, servers, llama, expected):
    """The log is a schedule, up to its first merge with live requests: that comes after as many tokens again."""
    _, _, log = drained
    other = servers.adaptive(llama)
    entries = read_schedule(log)
    upto = next(i for i, entry in enumerate(entries) if entry["tp"] == 2 and entry["tokens"])
    begin = other.status()["num_switches"]
    assert other.post("/pat/schedule", entries[: upto + 1]).status_code == 200

    async def merged() -> None:
        async with other.session() as session:
            await other.wait_for_schedule(session)

    same(asyncio.run(drain(other, "again", merged)), expected)
    again = other.status()["switches"][begin - other.status()["num_switches"] :]
    assert [s["to_tp"] for s in again] == [entry["tp"] for entry in entries[: upto + 1]]
    # How many are alive after so many tokens depends on how far the replicas were apart.
    assert TAIL <= again[-1]["requests"] <= TAIL + len(LENGTHS)


def wait_for_base(server) -> None:
    """Wait until the engine has gone back to the base layout, as it does when nothing is alive."""
    asyncio.run(wait_for_layout(server.status, 1))


def test_a_round_of_a_known_size_starts_in_the_better_layout(servers, llama, deployment, tmp_path):
    """Nothing is alive at that switch, before its first request."""
    path = tmp_path / "merged.json"
    profiles.save(make_profile(deployment, tp2_with_16=0.012), path)
    short = [body(seed, 60, None) for seed in range(6)]
    wanted = tokens(servers.stock(llama).generate(short))
    flags = f"--tp 1 --dp 2 --adaptive-tp --pat-profile {path} --pat-profile-as-is --pat-policy survival"
    server = servers.get(llama, *flags.split())

    for _ in range(5):
        assert tokens(server.generate(short)) == wanted
        wait_for_base(server)  # a round that finds the better layout already has nothing to switch
    switches = server.status()["switches"]
    assert [s for s in switches if s["to_tp"] == 2 and s["requests"] == 0 and s["reason"] == "survival"], switches
    assert not any(s["error"] for s in switches) and len(switches) <= 10


# -- calibration ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong(deployment, tmp_path_factory) -> Path:
    """The profile of a machine on which a step of tp2 takes a hundred times as long as one of tp1."""
    found = make_profile(deployment)
    decode = tuple(msgspec.structs.replace(point, seconds=1.0 if point.tp == 2 else 0.01) for point in found.decode)
    path = tmp_path_factory.mktemp("profile") / "wrong.json"
    profiles.save(msgspec.structs.replace(found, decode=decode), path)
    return path


@pytest.mark.long
def test_a_calibrated_engine_begins_as_any_other_but_knows_its_layouts(servers, llama, wrong):
    """An engine measures its layouts before its first request."""
    work = [streams.body(n, 1) for n in range(3)]  # of a single token: what decodes nothing corrects nothing
    flags, states, answers = "--tp 1 --dp 2 --adaptive-tp --pat-policy survival", {}, {}
    for steps in (0, 8):
        server = servers.get(llama, *flags.split(), "--pat-profile", str(wrong), "--pat-calibrate", str(steps))
        answers[steps] = tokens(server.generate(work))
        assert server.post("/flush_cache").status_code == 200
        states[steps] = server.status()
        del states[steps]["totals"]["seconds"]
        assert server.log_text().count("calibrated in") == (1 if steps else 0), server.log_text()[-3000:]
    factors = {steps: state.pop("step_factors") for steps, state in states.items()}
    assert factors[0] == {"1": [1.0, 0.0, 0.0], "2": [1.0, 0.0, 0.0]}
    assert factors[8]["2"][0] < factors[8]["1"][0], "its steps take nothing like a hundred times as long"
    assert factors[8]["2"][1:] != [0.0, 0.0], "at several batches and contexts"
    assert states[8] == states[0], "layout, KV in use, switches, requests"
    assert answers[8] == answers[0]
