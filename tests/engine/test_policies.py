"""Policies that predict, in the engine: they switch in a long-tail batch, lose nothing, and log what they saw."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import DecodePoint, Fingerprint, PrefillPoint, Profile, SwitchSample

LENGTHS = [12 + 3 * i for i in range(12)] + [700, 800, 900, 1000]
"""Response lengths, tokens: a body that ends early and a tail."""

LIMIT = 1200

DEPLOYMENT = """
import sys, msgspec
from sglang_pat.host import cpu_shim
cpu_shim.install() if cpu_shim.needed() else None
from sglang_pat.host.args import AdaptiveServerArgs
from sglang_pat.host.deployment import deployment
args = AdaptiveServerArgs(model_path=sys.argv[1], tp_size=1, dp_size=2, adaptive_tp=True, dtype="float32")
print(msgspec.json.encode(deployment(args)).decode())
"""


def fingerprint(model: Path) -> Fingerprint:
    ran = subprocess.run([sys.executable, "-c", DEPLOYMENT, str(model)], capture_output=True, text=True, check=True)
    return profiles.msgspec.json.decode(ran.stdout.strip().splitlines()[-1], type=Fingerprint)


def made_up(deployment: Fingerprint, tp2_with_16: float = 0.048) -> Profile:
    """So that policies act: tp1 is faster for many requests, tp2 for few; a switch costs 10 ms.

    ``tp2_with_16``: seconds of a step of 16 requests in tp2; in tp1 it takes 0.024.
    """
    seconds = {(1, 1): 0.020, (1, 16): 0.024, (2, 1): 0.010, (2, 16): tp2_with_16}
    decode = [
        DecodePoint(tp=tp, replicas=2 // tp, batch=b, context=c, seconds=s + 1e-7 * b * c, samples=(s,))
        for (tp, b), s in seconds.items()
        for c in (64, 1024)
    ]
    prefill = [
        PrefillPoint(tp=tp, replicas=2 // tp, batch=b, length=n, seconds=1e-4 * b * n / tp, samples=(1e-4,))
        for tp in (1, 2)
        for b in (1, 16)
        for n in (16, 1024)
    ]
    switches = [
        SwitchSample(
            from_tp=a, to_tp=b, requests=n, tokens=200 * n, mode="migrate", moved_bytes=n << 20,
            pause_seconds=0.01, prepare_seconds=0.0,
            phases={"prepare": 0.0, "drain": 0.001, "capsules": 0.004, "plan": 0.002, "kv": 1e-4 * n, "install": 0.002},
        )
        for a, b in ((1, 2), (2, 1))
        for n in (0, 2, 8)
    ]  # fmt: skip
    return Profile(
        fingerprint=deployment, complete=True, decode=tuple(decode), prefill=tuple(prefill), switches=tuple(switches)
    )


@pytest.fixture(scope="module")
def profile(llama, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "llama.json"
    profiles.save(made_up(fingerprint(llama)), path)
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


def test_a_round_of_a_known_size_starts_in_the_better_layout(servers, llama, tmp_path):
    """Before its first request: nothing is alive at that switch."""
    path = tmp_path / "merged.json"
    profiles.save(made_up(fingerprint(llama), tp2_with_16=0.012), path)
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
