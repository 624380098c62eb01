"""Random schedules of switches change no token of any request.

Each schedule (``schedules.py``, ``schedule_runs.py``) runs on an adaptive server that switches in the middle of it; the
token ids must be those of stock SGLang at tp 1.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from sglang_pat.testing import models

from . import schedule_runs, schedules
from .conftest import MODELS, make_model, tell
from .streams import check_idle, hold, tokens

SOAK = int(os.environ.get("SGLANG_PAT_SOAK", 2000))
"""Schedules of the soak run, all setups together: 200 of each mixture of experts."""
MOST = 5
"""A setup has its share of them by its count, up to this."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One adaptive server and how many schedules it is put through."""

    model: str
    ranks: int
    count: int
    base: int = 1
    """The lowest degree."""
    flags: tuple[str, ...] = ()
    max_total_tokens: int = 16384
    env: dict[str, str] | None = None
    as_on_cuda: bool = False
    """``Servers.as_on_cuda``."""
    limits: dict[str, int] = field(default_factory=dict)
    """Options of :func:`schedules.make`."""
    lends: bool = False
    """Half of the switches lend ranks, or take them back."""
    long: bool = False
    """Runs with ``LONG=1`` only, as do all schedules of the others but the first."""
    soak_only: bool = False
    stock: bool = True
    """Compare with stock SGLang; else, outside the soak, with the server itself where it does not switch."""

    def schedule(self, name: str, seed: int) -> schedules.Schedule:
        degrees = [degree for degree in (1, 2, 4, 8) if self.base <= degree <= self.ranks]
        strides = [2 * degree for degree in degrees if 2 * degree * self.base <= self.ranks] if self.lends else []
        return schedules.make(seed, degrees, name=name, strides=strides, **self.limits)


CHUNKED = ("--chunked-prefill-size", "128")
HEAD = MODELS / "head"
"""A random drafter beside the texts: it is wrong, as good as always."""
REPEATED = dict(repeats=0.6)
"""Responses to one prompt: one drafts from the other."""
FEW = dict(max_batch=8, max_prompt=200, max_new_tokens=40)

SETUPS = {
    "llama": Setup(model="llama-kv2", ranks=2, count=4),
    "llama-as-on-cuda": Setup(model="llama-kv2", ranks=2, count=3, as_on_cuda=True),
    "llama-recompute": Setup(model="llama-kv2", ranks=2, long=True, count=3, flags=("--pat-kv", "recompute")),
    # Drafts are checked in each decode step, up to 128 rows.
    "llama-drafts": Setup(model="llama-kv2", ranks=2, count=5, flags=("--pat-speculate", "4"), limits=REPEATED),
    "llama-drafts-as-on-cuda": Setup(
        model="llama-kv2",
        ranks=2,
        count=3,
        as_on_cuda=True,
        flags=("--pat-speculate", "3", "--pat-draft-model", str(HEAD)),
        limits=REPEATED,
    ),
    "flat-4-ranks-drafts": Setup(
        model="llama-flat",
        ranks=4,
        long=True,
        count=3,
        flags=(*CHUNKED, "--pat-speculate", "2", "--pat-draft-model", str(HEAD)),
        limits=REPEATED,
    ),
    "flat-4-ranks": Setup(model="llama-flat", ranks=4, long=True, count=4, flags=CHUNKED),
    # Bias in q, k and v.  Six decoding requests a rank at most: some wait, and twelve do not fit after a merge.
    "qwen2": Setup(
        model="qwen2",
        ranks=2,
        count=4,
        stock=False,
        flags=(*CHUNKED, "--max-running-requests", "6", "--pat-kv-exchange", "alltoall"),
    ),
    # Norms on q and k, tied embeddings.  Little KV, lavishly given out: requests are retracted.
    "qwen3": Setup(
        model="qwen3",
        ranks=2,
        count=4,
        max_total_tokens=1200,
        flags=(*CHUNKED, "--schedule-conservativeness", "0.2"),
        env={"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "100"},
    ),
    # Ranks are lent, and those that are left switch among themselves.
    "lent": Setup(model="llama-kv2", ranks=2, count=4, lends=True),
    "lent-4-ranks": Setup(model="llama-flat", ranks=4, long=True, count=5, lends=True, flags=CHUNKED),
    "lent-drafts": Setup(
        model="llama-kv2", ranks=2, long=True, count=2, lends=True, flags=("--pat-speculate", "4"), limits=REPEATED
    ),
    "lent-4-ranks-drafts": Setup(
        model="llama-flat",
        ranks=4,
        count=2,
        lends=True,
        flags=(*CHUNKED, "--pat-speculate", "4", "--pat-draft-model", str(HEAD)),
        limits=REPEATED,
    ),
    "lent-8-ranks": Setup(model="llama-kv2", ranks=8, long=True, count=3, lends=True, limits=FEW),
    # As PAT moves weights and KV; its group is made on first use.
    "qwen3-pat": Setup(
        model="qwen3",
        ranks=4,
        long=True,
        count=3,
        flags=(*CHUNKED, "--pat-weights", "reshard", "--pat-kv-exchange", "allgather"),
        env={"SGLANG_PAT_CHECK_STEADY": "0"},
    ),
    # q, k and v in one tensor of the checkpoint; norms over all heads, for which ranks gather q and k.
    "phi3": Setup(model="phi3", ranks=2, long=True, count=1, stock=False),
    "olmo2": Setup(model="olmo2", ranks=2, long=True, count=1, stock=False),
    # Through SGLang's Transformers backend.
    "smollm3": Setup(model="smollm3", ranks=2, long=True, count=1),
    # Takes the rank of a group for its pipeline stage.
    "phi": Setup(model="phi", ranks=2, long=True, count=1, stock=False),
    "seed-oss": Setup(model="seed_oss", ranks=4, count=1, soak_only=True),
    "helium": Setup(model="helium", ranks=2, count=1, soak_only=True),
    "ernie": Setup(model="ernie4_5", ranks=4, count=1, soak_only=True),
    "starcoder2": Setup(model="starcoder2", ranks=4, count=1, soak_only=True),
    # Mixtures of experts.  Few tokens: on a CPU their experts are multiplied one by one.
    "qwen3-moe": Setup(model="qwen3_moe", ranks=2, count=8, stock=False, limits=FEW),
    "qwen2-moe": Setup(model="qwen2_moe", ranks=4, base=2, long=True, count=8, stock=False, limits=FEW),
    "mixtral": Setup(model="mixtral", ranks=4, count=8, flags=CHUNKED, limits=FEW),
    "mixtral-drafts": Setup(
        model="mixtral", ranks=4, long=True, count=4, flags=(*CHUNKED, "--pat-speculate", "4"), limits=FEW | REPEATED
    ),
    "qwen3-drafts": Setup(
        model="qwen3",
        ranks=2,
        long=True,
        count=3,
        max_total_tokens=1200,
        flags=(*CHUNKED, "--schedule-conservativeness", "0.2", "--pat-speculate", "4"),
        limits=REPEATED,
        env={"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "100"},
    ),
    "mixtral-as-on-cuda": Setup(model="mixtral", ranks=2, count=3, as_on_cuda=True, limits=FEW, soak_only=True),
    "mixtral-pat": Setup(model="mixtral", ranks=2, long=True, count=2, flags=("--pat-weights", "reshard"), limits=FEW),
    "mistral": Setup(model="mistral", ranks=2, count=1, soak_only=True),
    "glm4": Setup(model="glm4", ranks=2, count=1, soak_only=True),
    "granite": Setup(model="granite", ranks=2, count=1, soak_only=True),
    "smollm2": Setup(
        model="smollm2",
        ranks=2,
        count=1,
        flags=CHUNKED,
        stock=False,
        soak_only=True,  # 570 MB that are made first, and two minutes for a dozen tokens
        limits=dict(vocab=49152, max_batch=4, max_prompt=60, max_new_tokens=12),
    ),
}


MODEL_OPTIONS = {
    "llama-kv2": ("llama", {"kv_heads": 2}),
    "llama-flat": ("llama", {"kv_heads": 2, "logit_std": 1.0}),
    "qwen3": ("qwen3", {"tie": True, "layers": 3}),
}


def make_named(name: str) -> Path:
    if name == "smollm2":
        return models.make_smollm2(MODELS / name)
    arch, options = MODEL_OPTIONS.get(name, (name, {}))
    return make_model(arch, name, **options)


class Runner:
    """Runs schedules of one setup after another and keeps the totals."""

    def __init__(self, servers, plan: dict[str, list[int]]) -> None:
        self.servers = servers
        self.plan = plan
        """The seeds that each setup will be asked for."""
        self.known: dict[str, dict] = {}
        self.totals: dict[str, schedule_runs.Totals] = {}

    def stock(self, model: str):
        # A token of the real model takes a hundred times the KV.
        return self.servers.stock(make_named(model), max_total_tokens=16384 if model == "smollm2" else 65536)

    def adaptive(self, name: str):
        setup = SETUPS[name]
        models.make_head(HEAD, layers=[0])
        options = {} if setup.max_total_tokens == 16384 else {"max_total_tokens": setup.max_total_tokens}
        if setup.as_on_cuda:
            return self.servers.as_on_cuda(make_named(setup.model), setup.ranks, *setup.flags)
        return self.servers.adaptive(
            make_named(setup.model), setup.ranks // setup.base, *setup.flags, tp=setup.base, env=setup.env, **options
        )

    def run(self, name: str, seed: int) -> None:
        setup, plan = SETUPS[name], self.plan
        known = self.known.setdefault(setup.model, {})
        schedule = setup.schedule(name, seed)

        def reference():
            return self.stock(setup.model) if setup.stock or seed in SOAK_PLAN[name] else self.adaptive(name)

        if any(request.key not in known for request in schedule.requests):
            # For all schedules on this model at once: the stock server is needed just once.
            same = [(other, n) for n, other in SETUPS.items() if other.model == setup.model and n in plan]
            wanted = [other.schedule(n, seed) for other, n in same for seed in plan[n]]
            schedule_runs.add_expected(reference(), wanted, known)
        server = self.adaptive(name)
        totals = self.totals.setdefault(name, schedule_runs.Totals())
        outcome = schedule_runs.run(server, schedule)
        schedule_runs.compare(schedule, outcome, known, reference, totals)
        check_idle(server)
        totals.counts["retracted"] = server.status()["retracted"]
        assert len(totals.ties) <= max(1, totals.counts["tokens compared"] * schedule_runs.TIES_PER_TOKEN)
        if seed == plan[name][-1]:
            checked, right = totals.counts["drafts checked"], totals.counts["drafts right"]
            drafted = "--pat-speculate" in setup.flags
            assert (checked > right) == drafted
            assert right or not drafted or len(plan[name]) == 1, "in one schedule all may be wrong"
            tell(f"{name}: {totals}")


@pytest.fixture(scope="module")
def runner(servers, request):
    plan: dict[str, list[int]] = {}
    for item in request.session.items:
        if item.name.startswith("test_same_tokens"):
            given = item.callspec.params
            plan.setdefault(given["name"], []).append(given["seed"])
    return Runner(servers, plan)


def _side(model: str) -> pytest.MarkDecorator:
    """See ``conftest.SIDES``."""
    return pytest.mark.xdist_group("llama" if model == "llama-kv2" else "others")


def _cases(plan: dict[str, range]) -> list:
    def mark(name: str, number: int) -> list[pytest.MarkDecorator]:
        is_long = plan is PLAN and (SETUPS[name].long or number > 0)
        return [_side(SETUPS[name].model), *[pytest.mark.long] * is_long]

    return [
        pytest.param(name, seed, marks=mark(name, number))
        for name, seeds in plan.items()
        for number, seed in enumerate(seeds)
    ]


PLAN = {name: range(setup.count) for name, setup in SETUPS.items() if not setup.soak_only}
SHARES = {name: min(setup.count, MOST) for name, setup in SETUPS.items()}
SOAK_PLAN = {name: range(10_000, 10_000 + -(-SOAK * share // sum(SHARES.values()))) for name, share in SHARES.items()}


@pytest.mark.parametrize(("name", "seed"), _cases(PLAN))
def test_same_tokens(runner, name, seed):
    runner.run(name, seed)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "seed"), _cases(SOAK_PLAN))
def test_same_tokens_soak(runner, name, seed):
    runner.run(name, seed)


def check_as_stock(runner: Runner, name: str, requests: list[schedules.Request], work) -> None:
    """``work`` gives the answers to ``requests`` on the server of the setup ``name``, from an empty cache on."""
    server = runner.adaptive(name)
    assert server.post("/flush_cache?timeout=500").status_code == 200

    async def run():
        async with server.session() as session:
            return tokens([await task for task in await work(server, session)])

    outputs = asyncio.run(run())
    check_idle(server)
    stock = runner.stock(SETUPS[name].model)
    assert outputs == tokens(stock.generate([request.body() for request in requests]))


@_side("llama-kv2")
def test_the_same_prompts_in_two_groups(runner):
    """One copy of a prefix goes after a merge; who shared it with its owner must not read what comes there next."""
    prefix = tuple(range(5, 205))
    tails = ((300,), (300, 301), (302,), (303, 304), (300,), (300, 301), (302,), (303, 304))
    sharing = [schedules.Request(prompt=prefix + tail, max_new_tokens=200) for tail in tails]
    # After each switch other requests fill the slots that have become free.
    filling = [schedules.Request(prompt=(400 + i, *range(200, 290)), max_new_tokens=20) for i in range(16)]

    async def work(server, session):
        tasks = await hold(server, session, [r.body() for r in sharing], step=5)
        for tp in (2, 1, 2):
            await server.set_schedule(session, {"tp": tp}, {"arrived": len(filling), "hold": True})
            more = [asyncio.ensure_future(server.generate_one(session, r.body())) for r in filling]
            (record,) = (await server.wait_for_schedule(session))["switches"]
            assert record["requests"] >= len(sharing), record
            await server.set_schedule(session, {"step": 40, "hold": True})
            await server.wait_for_schedule(session)
            await asyncio.gather(*more)
        await server.set_schedule(session)
        return tasks

    check_as_stock(runner, "llama", sharing, work)


@pytest.mark.long
@_side("qwen3")
def test_replicas_merge_that_admit_differently(runner):
    """Each replica has its own estimate of how many tokens its requests will need; a merged group has one."""
    long = [schedules.Request(prompt=(7, 8 + i), max_new_tokens=500) for i in range(2)]
    # More than fits in the pool.  The ranks must agree how many go in.
    burst = [schedules.Request(prompt=tuple(range(5 + i, 25 + i)), max_new_tokens=20) for i in range(80)]

    async def work(server, session):
        # The first one runs alone, and its replica's estimate falls with each step.
        tasks = await hold(server, session, [long[0].body()], step=110)
        await server.set_schedule(session, {"arrived": 1, "batch": 1}, {"tp": 2, "hold": True})
        tasks.append(asyncio.ensure_future(server.generate_one(session, long[1].body())))
        (record,) = (await server.wait_for_schedule(session))["switches"]
        assert record["requests"] == 2, record
        await server.set_schedule(session, {"arrived": len(burst)})
        return tasks + [asyncio.ensure_future(server.generate_one(session, r.body())) for r in burst]

    check_as_stock(runner, "qwen3", long + burst, work)


@pytest.mark.long
@_side("qwen3")
def test_replicas_merge_one_of_which_has_retracted(runner):
    """Four requests outgrow the pool of one replica, three fit into the other's."""
    prompts = [tuple(range(5 + 20 * i, 105 + 20 * i)) for i in range(7)]
    seven = [schedules.Request(prompt=prompt, max_new_tokens=250, may_end=True) for prompt in prompts]

    async def work(server, session):
        tasks = await hold(server, session, [r.body() for r in seven], step=150)
        before = server.status()["retracted"]
        while server.status()["retracted"] == before:
            assert not any(task.done() for task in tasks), "nothing was retracted"
            await server.set_schedule(session, {"step": 5, "hold": True})
            await server.wait_for_schedule(session)
        await server.set_schedule(session, {"tp": 2})
        return tasks

    check_as_stock(runner, "qwen3", seven, work)


@pytest.mark.long
@_side("llama-kv2")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.soak)])
def test_low_precision(runner, dtype):
    """A token is stock's best, given those before it, as often with switches as without."""
    name, model = "llama", make_named("llama-kv2")
    schedule = next(s for s in map(partial(SETUPS[name].schedule, dtype), range(100)) if len(s.switches) > 3)
    server = runner.servers.adaptive(model, 2, dtype=dtype)
    static = schedule_runs.run(server, replace(schedule, start_tp=1, switches=()))
    switched = schedule_runs.run(server, schedule)
    assert any(record["requests"] for record in switched.records)
    check_idle(server)
    stock = runner.stock("llama-kv2")
    share, with_switches = (schedule_runs.agreement(stock, schedule, run) for run in (static, switched))
    print(f"{dtype}: {share:.3f} of the tokens are float32's best, {with_switches:.3f} with switches")
    assert share > 0.8 and with_switches > share - 0.05
