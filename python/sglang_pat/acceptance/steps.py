"""The steps of the acceptance.  Each is a function of the :class:`Bench`; :data:`STEPS` lists them in order.

Those that compare answers are in ``answers.py``.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from profiler.launch import make_server_args
from profiler.worker import search_path
from sglang_pat import preflight
from sglang_pat.acceptance import commands, kernels
from sglang_pat.acceptance.answers import (
    drafts,
    lent_ranks,
    likelihood,
    likelihood_of_experts,
    read_degrees,
    real_model,
    same_tokens,
    same_tokens_of_experts,
    steady,
)  # fmt: skip
from sglang_pat.acceptance.bench import Bench
from sglang_pat.acceptance.experts import experts
from sglang_pat.acceptance.judge import judge
from sglang_pat.acceptance.results import Result
from sglang_pat.memory.memory_plan import GIB, MemoryPlan
from sglang_pat.testing.prefork import run

COPY_SHARE = 0.8
"""Share of a copy's bandwidth that packing and unpacking must reach on a GPU, from :data:`COPY_TOKENS` tokens on."""
COPY_TOKENS = 8192
PATS_WAY = ("--pat-weights", "reshard", "--pat-kv-exchange", "allgather")
SWEEP_BUDGET, SWEEP_SECONDS = "3m", 1200
"""Budget of the sweep, and its longest duration."""
CPU_GRID = "batch=1,4;context=96;lone=1;prefill_batch=1;prefill_length=64;switch_requests=4;switch_context=128"
GPU_GRID = (
    "batch=1,8,64;context=256,4096;lone=1;prefill_batch=1;prefill_length=256,2048;switch_requests=8;switch_context=1024"
)
ENDURANCE = 50
GROWTH = 64 << 20
"""Number of switches, and bytes that an engine may have grown by after them: allocators round."""


def check_machine(bench: Bench) -> Result:
    """What is needed is there, and the model fits."""
    missing = [f"{what}: {finding}" for fine, what, finding in preflight.run_checks() if not fine]
    if missing:
        return Result(verdict="failed", line="; ".join(missing))
    plan = _plan(bench)
    rows = [["memory of a rank, planned", "MiB"], *([what, f"{size >> 20}"] for what, size in plan.parts.items())]
    line = f"{plan.tokens:,} KV tokens a replica, {plan.rank_bytes / GIB:.1f} GiB a rank planned"
    return Result(verdict="passed", line=line, rows=rows, figures={"rank_bytes": plan.rank_bytes})


def _plan(bench: Bench) -> MemoryPlan:
    """Plan of the engine with default flags, as its start will make it."""
    flags = [*bench.layout, *bench.flags, *bench.large_flags]
    with mock.patch.dict(os.environ, bench.env):
        args = make_server_args(str(bench.large), flags)
        from sglang_pat.host.arguments import make_spec  # once the shim is there

        plan = make_spec(args).memory
        assert plan is not None, "on a CPU or CUDA"
        return plan


def move_kv(bench: Bench) -> Result:
    """KV is packed and unpacked nearly as fast as memory is copied."""
    torch.set_num_threads(1)
    heads, dim, dtype = (8, 128, torch.bfloat16) if bench.device == "cuda" else (4, 64, torch.float32)
    rows, records, slowest = [["tokens", "parts", "MB", "pack / copy", "unpack / copy"]], [], 1e9
    for tokens in (1024, COPY_TOKENS, 4 * COPY_TOKENS)[: 3 if bench.device == "cuda" else 2]:
        for parts in (1, 2, 4):
            row = kernels.measure(bench.device, heads, dim, dtype, parts, tokens, repeats=10)
            records.append(row)
            shares = [row["copy_seconds"] / row[f"{what}_seconds"] for what in ("pack", "unpack")]
            rows.append([str(tokens), str(parts), f"{row['bytes'] / 1e6:.1f}", *(f"{share:.2f}" for share in shares)])
            if tokens >= COPY_TOKENS:
                slowest = min(slowest, *shares)
    if bench.device == "cuda":
        torch.cuda.empty_cache()  # for the engines
    line = f"at {COPY_TOKENS} tokens and more at least {slowest:.0%} of a copy's bandwidth"
    verdict = "measured" if bench.device == "cpu" else "passed" if slowest >= COPY_SHARE else "failed"
    return Result(verdict=verdict, line=f"{line} (bar {COPY_SHARE:.0%})", rows=rows, figures={"rows": records})


def start(bench: Bench) -> Result:
    """An engine of all ranks starts with default flags, within its memory plan."""
    planned = _plan(bench).rank_bytes  # of what is free before the engine takes it
    worker = bench.start_default_engine()
    description, measured = worker.do(commands.describe), bench.measure_memory(worker)
    line = (
        f"{bench.large.name}: up in {worker.started_seconds:.0f} s, degrees {description['degrees']}; a rank takes "
        f"{max(measured) / GIB:.2f} GiB, planned {planned / GIB:.2f}"
    )
    figures = description | {"seconds": worker.started_seconds, "measured": measured, "planned": planned}
    return Result(verdict="passed", line=line, figures=figures)


def pause(bench: Bench) -> Result:
    """What a switch costs by tokens and requests, beside PAT's way and a restart."""
    ways = {"ours": bench.large_flags, "PAT's": (*bench.large_flags, *PATS_WAY)}
    if bench.device == "cuda":
        ways["PAT's"] += ("--disable-cuda-graph",)
    points = [(1, 512), (8, 4096), (32, 16384)] if bench.device == "cuda" else [(1, 256), (4, 2048)]
    rows, costs = [["way", "requests", "tokens", "up, ms", "down, ms", "bytes sent, MB", "phases up, ms"]], []
    for way, flags in ways.items():
        worker = bench.start_engine(bench.large, *flags)
        if way == "ours":
            # The first start of a machine compiles what a restart finds.
            bench.stop()
            worker = bench.start_engine(bench.large, *flags)
            restart = worker.started_seconds
            restart += worker.do(commands.time_prefill, tokens=points[-1][1], requests=points[-1][0])
        for requests, tokens in points:
            load = {"requests": requests, "tokens": tokens}
            records = worker.do(commands.measure_pauses, low=1, high=bench.ranks, rounds=3, **load)
            costs.append({"way": way, "records": records} | load)
            up, down = ([r for r in records if (r["to_tp"] > r["from_tp"]) == rising] for rising in (True, False))
            seconds = [statistics.median(r["pause_seconds"] for r in part) for part in (up, down)]
            phases = " ".join(f"{name} {value * 1e3:.1f}" for name, value in up[-1]["phases"].items())
            sent = f"{up[-1]['moved_bytes'] / 1e6:.2f}"
            rows.append([way, str(requests), str(tokens), *(f"{s * 1e3:.1f}" for s in seconds), sent, phases])
            costs[-1] |= {"up": seconds[0], "down": seconds[1]}
    rows.append(["restart", str(points[-1][0]), str(points[-1][1]), f"{restart * 1e3:.0f}", "", "", "start, prefill"])
    ours, pats = (next(f["up"] for f in costs if f["way"] == way and f["tokens"] == points[-1][1]) for way in ways)
    line = (
        f"{points[-1][0]} requests of {points[-1][1]} tokens in all: {ours * 1e3:.1f} ms, PAT's way {pats / ours:.1f} "
        f"times as long, a restart {restart / ours:.0f} times"
    )
    return Result(verdict="measured", line=line, rows=rows, figures={"points": costs, "restart": restart})


def step_times(bench: Bench) -> Result:
    """Decode steps by layout and batch, with as many requests in all."""
    worker = bench.start_default_engine()
    degrees = read_degrees(worker)
    each = (1, 4) if bench.device == "cpu" else (1, 4, 16) if bench.sharing else (1, 4, 16, 64)
    totals = [bench.ranks * n for n in each]
    rows, times = [["requests", *(f"tp{tp}, ms" for tp in degrees)]], {}
    for total in totals:
        for tp in degrees:
            batch = total * tp // bench.ranks
            times[f"{total} tp{tp}"] = worker.do(commands.time_step, tp=tp, batch=batch, context=256, steps=24)
        rows.append([str(total), *(f"{times[f'{total} tp{tp}'] * 1e3:.2f}" for tp in degrees)])
    one = {tp: worker.do(commands.time_step, tp=tp, batch=1, context=256, steps=24) for tp in degrees}
    rows.append(["1 a replica", *(f"{seconds * 1e3:.2f}" for seconds in one.values())])
    best = min(one, key=lambda tp: one[tp])
    line = f"one request a replica: tp{best} is {one[1] / one[best]:.2f} times as fast as tp1"
    figures = {"steps": times, "one": {str(tp): seconds for tp, seconds in one.items()}}
    return Result(verdict="measured", line=line, rows=rows, figures=figures)


def long_tail(bench: Bench) -> Result:
    """One batch of which most answers are short: each static layout, and a merge when two are left."""
    worker = bench.start_default_engine()
    degrees = read_degrees(worker)
    lengths = bench.tail
    ways: dict[str, dict[str, Any]] = {f"static tp{tp}": {"start": tp} for tp in degrees}
    ways["merge at 2"] = {"start": 1, "merge_at": 2, "high": bench.ranks}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, way in ways.items():
            seconds[name].append(worker.do(commands.run_long_tail, lengths=lengths, **way)["seconds"])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [["way", "seconds"], *([name, f"{value:.2f}"] for name, value in medians.items())]
    bench.best_static = min(value for name, value in medians.items() if name.startswith("static"))
    share = medians["merge at 2"] / bench.best_static
    line = (
        f"{len(lengths)} answers of {min(lengths)} to {max(lengths)} tokens: merging takes {share:.2f} of the best "
        "static layout"
    )
    return Result(verdict="measured", line=line, rows=rows, figures={"seconds": seconds})


def endurance(bench: Bench) -> Result:
    """Memory after many switches."""
    worker = bench.start_default_engine()
    arguments = {"low": 1, "high": bench.ranks, "requests": 2, "tokens": 256}
    worker.do(commands.measure_pauses, rounds=3, **arguments)
    before = bench.measure_memory(worker)
    for _ in range(ENDURANCE // 10):
        worker.do(commands.measure_pauses, rounds=5, **arguments)
    grown = max(now - then for now, then in zip(bench.measure_memory(worker), before, strict=True))
    line = f"{ENDURANCE} switches: the rank that grew most by {grown / 2**20:+.0f} MiB (bar {GROWTH >> 20})"
    return Result(verdict="passed" if grown <= GROWTH else "failed", line=line, figures={"grown": grown})


def sweep(bench: Bench) -> Result:
    """The profiler measures this deployment, in its shortest form."""
    bench.stop()
    bench.profile.unlink(missing_ok=True)
    grid = GPU_GRID if bench.device == "cuda" else CPU_GRID
    argv = [
        "--model-path", str(bench.large), "--out", str(bench.profile), "--grid", grid, "--budget", SWEEP_BUDGET,
        *bench.layout, *bench.flags, *bench.large_flags,
    ]  # fmt: skip
    done = run(bench.prefork, "profiler.sweep", argv, os.environ | search_path() | bench.env, SWEEP_SECONDS)
    last = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    verdict = "passed" if done.returncode == 0 else "failed"
    return Result(verdict=verdict, line=last.replace(f"{bench.folder}/", ""))


def adaptive(bench: Bench) -> Result:
    """The long-tail batch again: the policy decides by the profile that was just measured."""
    if not bench.profile.exists():
        return Result(verdict="failed", line="there is no profile: run the step sweep as well")
    worker = bench.start_engine(
        bench.large, *bench.large_flags, policy=("--pat-policy", "survival", "--pat-profile", str(bench.profile))
    )
    lengths = bench.tail
    runs = [worker.do(commands.run_long_tail, lengths=lengths) for _ in range(3)]
    seconds = statistics.median(run["seconds"] for run in runs)
    beside = f", {seconds / bench.best_static:.2f} of the best static layout" if bench.best_static else ""
    line = f"{len(lengths)} answers, {runs[-1]['switches']} switches in {len(runs)} batches: {seconds:.2f} s{beside}"
    return Result(verdict="measured", line=line, figures={"runs": runs})


STEPS: tuple[Callable[[Bench], Result], ...] = (
    check_machine,
    move_kv,
    experts,
    judge,
    start,
    step_times,
    long_tail,
    endurance,
    pause,
    same_tokens_of_experts,
    same_tokens,
    drafts,
    steady,
    lent_ranks,
    likelihood,
    likelihood_of_experts,
    real_model,
    sweep,
    adaptive,
)
"""The steps in an order in which few engines are started."""
