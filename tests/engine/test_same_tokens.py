"""Random schedules of switches change no token of any request.

Each schedule (``schedules.py``) runs on an adaptive server that switches in the middle of it; the
token ids must be those of stock SGLang at tp 1.  SGLang's leak checks are on, at rest and in every step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import schedules
from conftest import MODELS

from sglang_pat.testing import models

LEAK_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}

SOAK = int(os.environ.get("SGLANG_PAT_SOAK", 1000))
"""Schedules of the soak run, all setups together."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One adaptive server and how many schedules it is put through."""

    model: str
    ranks: int
    count: int
    flags: tuple[str, ...] = ()
    max_total_tokens: int = 16384
    limits: dict[str, int] = field(default_factory=dict)
    """Options of :func:`schedules.make`."""

    def schedule(self, name: str, seed: int) -> schedules.Schedule:
        degrees = [degree for degree in (1, 2, 4) if degree <= self.ranks]
        return schedules.make(seed, degrees, name=name, **self.limits)


SETUPS = {
    # Two KV heads: one for each of two ranks, copied at tp 4.  503 tokens: padded at tp 2 and 4.
    "llama": Setup(model="llama", ranks=2, count=25),
    "llama-4-ranks": Setup(model="llama", ranks=4, count=25),
    "llama-recompute": Setup(model="llama", ranks=2, count=8, flags=("--pat-kv", "recompute")),
    # Bias in q, k and v.  Six decoding requests a rank at most: some wait, and twelve do not fit after a merge.
    "qwen2": Setup(model="qwen2", ranks=2, count=25, flags=("--max-running-requests", "6")),
    # Norms on q and k, tied embeddings.  Little KV, lavishly given out: requests are retracted.
    "qwen3": Setup(
        model="qwen3", ranks=2, count=25, max_total_tokens=1200, flags=("--schedule-conservativeness", "0.1")
    ),
    "qwen3-reshard": Setup(model="qwen3", ranks=4, count=8, flags=("--pat-weights", "reshard")),
    "smollm2": Setup(
        model="smollm2",
        ranks=2,
        count=3,
        limits=dict(vocab=49152, max_batch=8, max_prompt=120, max_new_tokens=24),
    ),
}


def make_model(name: str) -> Path:
    if name == "smollm2":
        return models.make_smollm2(MODELS / "smollm2")
    options = {"llama": {"kv_heads": 2}, "qwen2": {}, "qwen3": {"tie": True}}[name]
    return models.make_random(name, MODELS / "-".join([name, *(f"{k}{v}" for k, v in options.items())]), **options)


class Runner:
    """Runs schedules of one setup after another and keeps the totals."""

    def __init__(self, servers) -> None:
        self.servers = servers
        self.known: dict[str, dict] = {}
        self.totals: dict[str, schedules.Totals] = {}

    def stock(self, model: str):
        return self.servers.stock(make_model(model), max_total_tokens=65536)

    def run(self, name: str, seed: int, plan: dict[str, range]) -> None:
        """``plan``: the seeds that each setup will be asked for."""
        setup = SETUPS[name]
        known = self.known.setdefault(setup.model, {})
        schedule = setup.schedule(name, seed)
        if any(request.key not in known for request in schedule.requests):
            # For all schedules on this model at once: the stock server is needed just once.
            same = [(other, n) for n, other in SETUPS.items() if other.model == setup.model]
            wanted = [other.schedule(n, seed) for other, n in same for seed in plan[n]]
            schedules.expected(self.stock(setup.model), wanted, known)
        options = {"max_total_tokens": setup.max_total_tokens, "env": LEAK_CHECKS}
        flags = ("--chunked-prefill-size", "128", *setup.flags)
        server = self.servers.adaptive(make_model(setup.model), setup.ranks, *flags, **options)
        totals = self.totals.setdefault(name, schedules.Totals())
        outcome = schedules.run(server, schedule)
        schedules.compare(schedule, outcome, known, lambda: self.stock(setup.model), totals)
        assert any(record["requests"] for record in outcome.records), outcome.records
        schedules.check_idle(server)
        totals.retracted = sum(group["retracted"] for group in server.status()["groups"])


@pytest.fixture(scope="module")
def runner(servers):
    return Runner(servers)


def _cases(plan: dict[str, range]) -> list[tuple[str, int]]:
    return [(name, seed) for name, seeds in plan.items() for seed in seeds]


PLAN = {name: range(setup.count) for name, setup in SETUPS.items()}
SOAK_PLAN = {
    name: range(10_000, 10_000 + -(-SOAK * setup.count // sum(setup.count for setup in SETUPS.values())))
    for name, setup in SETUPS.items()
}


@pytest.mark.parametrize(("name", "seed"), _cases(PLAN))
def test_same_tokens(runner, name, seed):
    runner.run(name, seed, PLAN)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "seed"), _cases(SOAK_PLAN))
def test_same_tokens_soak(runner, name, seed):
    runner.run(name, seed, SOAK_PLAN)


@pytest.mark.soak
def test_totals_soak(runner, capsys):
    test_totals(runner, capsys)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(runner, dtype):
    """A token is stock's best, given those before it, as often with switches as without."""
    name, model = "llama", make_model("llama")
    schedule = next(s for s in map(partial(SETUPS[name].schedule, dtype), range(100)) if len(s.switches) > 3)
    server = runner.servers.adaptive(model, 2, "--chunked-prefill-size", "128", dtype=dtype, env=LEAK_CHECKS)
    static = schedules.run(server, replace(schedule, start_tp=1, switches=()))
    switched = schedules.run(server, schedule)
    assert any(record["requests"] for record in switched.records)
    schedules.check_idle(server)
    share, with_switches = (schedules.agreement(runner.stock(name), schedule, run) for run in (static, switched))
    print(f"{dtype}: {share:.3f} of the tokens are float32's best, {with_switches:.3f} with switches")
    assert share > 0.8 and with_switches > share - 0.05


def test_totals(runner, capsys):
    with capsys.disabled():
        for name, totals in runner.totals.items():
            print(f"\n{name}: {totals}", *totals.ties, sep="\n  ")
    ties = sum(len(totals.ties) for totals in runner.totals.values())
    tokens = sum(totals.tokens for totals in runner.totals.values())
    assert ties <= max(1, tokens * schedules.TIES_PER_TOKEN)
