"""Policies that predict, in the engine: they switch in a long-tail batch, lose nothing, and log what they saw."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_up import made_up

from sglang_pat.predict import profile as profiles

LENGTHS = [12 + 3 * i for i in range(12)] + [700, 800, 900, 1000]
"""Response lengths, tokens: a body that ends early and a tail."""

LIMIT = 1200

@pytest.fixture(scope="module")
def profile(deployment, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "llama.json"
    profiles.save(made_up(deployment), path)
    return path


def bodies() -> list[dict]:
    """Lengths are fixed by ``max_new_tokens``; policies are told the same limit for all."""
    return [
        {
            "input_ids": [6 + (seed * 97 + i * 31) % 490 for i in range(12)],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": length,
                "ignore_eos": True,
                "custom_params": {"pat_limit": LIMIT},
            },
        }
        for seed, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def expected(servers, llama) -> list[list[int]]:
    return [answer["output_ids"] for answer in servers.stock(llama).generate(bodies())]


@pytest.mark.parametrize("policy", ["survival", "pat"])
def test_switches_in_a_long_tail_and_loses_nothing(servers, llama, expected, profile, tmp_path, policy):
    log = tmp_path / "decisions.jsonl"
    flags = f"--tp 1 --dp 2 --adaptive-tp --pat-profile {profile} --pat-policy {policy} --pat-log {log}".split()
    server = servers.get(llama, *flags)
    assert server.status()["policy"] == policy
    for _ in range(2):
        assert [answer["output_ids"] for answer in server.generate(bodies())] == expected
    switches = server.status()["switches"]
    live = [s for s in switches if s["to_tp"] == 2 and s["requests"] and not s["error"]]
    assert live and all(s["reason"] == policy for s in live)
    assert len(switches) <= 12, "flapping"
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[0] == "start" and events.count("length") == 2 * len(LENGTHS) and "decision" in events
    ran = subprocess.run(
        [sys.executable, "-m", "sglang_pat.replay", "--log", str(log), "--profile", str(profile)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def back_in_base(server, seconds: float = 20.0) -> None:
    """Wait until the engine has gone back to the base layout, as it does when nothing is alive."""
    deadline = time.monotonic() + seconds
    while (status := server.status())["layout"]["tp"] != 1 or status["switching"]:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)


def test_a_round_of_a_known_size_starts_in_the_better_layout(servers, llama, deployment, tmp_path):
    """Before its first request: nothing is alive at that switch."""
    path = tmp_path / "merged.json"
    profiles.save(made_up(deployment, tp2_with_16=0.012), path)
    short = bodies()[:6]
    for body in short:
        body["sampling_params"]["max_new_tokens"] = 60
    wanted = [answer["output_ids"] for answer in servers.stock(llama).generate(short)]
    server = servers.get(llama, *f"--tp 1 --dp 2 --adaptive-tp --pat-profile {path} --pat-policy survival".split())
    for _ in range(5):
        assert [answer["output_ids"] for answer in server.generate(short)] == wanted
        back_in_base(server)  # a round that finds the better layout already has nothing to switch
    switches = server.status()["switches"]
    assert [s for s in switches if s["to_tp"] == 2 and s["requests"] == 0 and s["reason"] == "survival"], switches
    assert not any(s["error"] for s in switches) and len(switches) <= 10
