"""What a switch costs with requests alive: ours, PAT's way, and a restart, in one run, taking turns.

    python bench/switch.py [--quick] [--only SETTING ...] [--rounds N] [--json FILE]

PAT's way (``--pat-weights reshard --pat-kv-exchange allgather``): weights and KV are gathered and cut in the pause.
But for the largest points both engines are alive, and the one that is not measured is stopped (SIGSTOP).  Prompts are
injected, not computed: what a switch moves does not depend on the values.  Restart: the engine is stopped and started
in the other layout, and all prompts are prefilled.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import _bench
import _switch_commands as commands
import _switch_figures as figures
from _switch_figures import QUICK, SETTINGS, SwitchSetting

from profiler import launch
from profiler.worker import Worker
from sglang_pat.acceptance.commands import time_prefill
from sglang_pat.testing import models
from sglang_pat.testing.server import suspend

CACHE = Path(".cache/models")
WAYS = {"ours": (), "PAT's": ("--pat-weights", "reshard", "--pat-kv-exchange", "allgather")}


LARGE = 16384
"""Tokens alive beyond which the engines are not there together: eight ranks' KV would not fit in memory."""


def engine(model: Path, setting: SwitchSetting, pool: int, *flags: str) -> Worker:
    """An engine; ``pool``: KV tokens of a replica."""
    sizes = ("--dtype", "float32", "--max-total-tokens", str(pool), "--max-running-requests", "64")
    return Worker(model, *setting.flags, *sizes, *flags)


def kv_bytes(model: Path) -> int:
    """KV bytes of a token, all heads and layers, float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim * 4


def layers(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["num_hidden_layers"]


def copy_seconds(ranks: int, size: int, repeats: int = 5) -> float:
    """Seconds for each of ``ranks`` processes to put ``size`` bytes into shared memory and to take another's out."""
    context = multiprocessing.get_context("fork")
    areas = [context.RawArray("b", size) for _ in range(ranks)]
    barrier, medians = context.Barrier(ranks), context.Queue()

    def run(rank: int) -> None:
        import numpy as np

        shared = [np.frombuffer(area, dtype=np.int8) for area in areas]
        source, into = np.ones(size, np.int8), np.ones(size, np.int8)
        best = []
        for _ in range(repeats + 1):
            barrier.wait()
            begun = time.perf_counter()
            shared[rank][:] = source
            barrier.wait()
            into[:] = shared[(rank + 1) % ranks]
            barrier.wait()
            best.append(time.perf_counter() - begun)
        if rank == 0:
            medians.put(statistics.median(best[1:]))

    processes = [context.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    seconds = medians.get()
    for process in processes:
        process.join()
    return seconds


def restart(model: Path, setting: SwitchSetting, pool: int) -> dict[str, float]:
    """Stop an engine, start one in the layout of the higher degree, prefill all requests again: seconds by part."""
    tokens, requests = setting.headline
    worker = engine(model, setting, pool)
    begun = time.monotonic()
    worker.stop()
    stopped_at = time.monotonic()
    high = str(setting.high)
    flags = ("--tp", high, "--dp", str(setting.ranks // setting.high), "--pat-candidates", high)
    sizes = ("--dtype", "float32", "--max-total-tokens", str(pool))
    with Worker(model, *flags, *sizes) as again:
        started = time.monotonic()
        prefill = again.do(time_prefill, requests=requests, tokens=tokens)
    return {"stop": stopped_at - begun, "start": started - stopped_at, "prefill": prefill}


def compare(model: Path, setting: SwitchSetting, rounds: int, save: Callable[[dict], None]) -> dict:
    """All points, both ways; then the restart.  ``save`` is given what is there after each point."""
    result: dict = {
        "flags": setting.flags, "ranks": setting.ranks, "kv_bytes_per_token": kv_bytes(model), "layers": layers(model),
        "points": [{"tokens": tokens, "requests": requests, "switches": {}} for tokens, requests in setting.points],
        "ways": list(WAYS),
    }  # fmt: skip
    small = [point for point in result["points"] if point["tokens"] <= LARGE]
    large = [point for point in result["points"] if point["tokens"] > LARGE]
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for way, flags in WAYS.items():
            with suspend(*workers.values()):
                workers[way] = stack.enter_context(engine(model, setting, kv_tokens(setting, small), *flags))
        measure(workers, setting, small, rounds, lambda: save(result))
        with suspend(*(worker for way, worker in workers.items() if way != "ours")):
            alone(workers["ours"], setting, small, result, rounds)
            save(result)
    for way, flags in WAYS.items() if large else ():
        with engine(model, setting, kv_tokens(setting, large), *flags) as worker:
            # With 64K tokens alive a batch takes minutes: its prompts are attended to whole, though injected.
            measure({way: worker}, setting, large, min(rounds, 2), lambda: save(result))
    result["restart"] = restart(model, setting, kv_tokens(setting, small))
    return result


def measure(
    workers: dict[str, Worker], setting: SwitchSetting, points: list[dict], rounds: int, save: Callable
) -> None:
    """Adds switches to the points: in each round all points, at each point one way after the other.

    So that what the machine does in one minute falls on all of them alike.
    """
    for number in range(rounds):
        for point in points:
            for way, worker in workers.items():
                with suspend(*(other for other in workers.values() if other is not worker)):
                    records = worker.do(commands.switches, **batch(setting, point["tokens"], point["requests"]))
                point["switches"].setdefault(way, []).extend(records)
            with suspend(*workers.values()):
                moved = point["switches"]["ours"][0]["moved_bytes"] // setting.ranks
                point.setdefault("copies", []).append(copy_seconds(setting.ranks, max(moved, 1)))
            print(f"  {number + 1}/{rounds} " + figures.line(point), flush=True)
            save()


def alone(worker: Worker, setting: SwitchSetting, points: list[dict], result: dict, rounds: int) -> None:
    """Figures of ours only: memory, lending, return to base, steps after a switch."""
    for point in points:
        point["taken"] = worker.do(commands.taken, **batch(setting, point["tokens"], point["requests"]))
        point["lending"] = worker.do(commands.lending, rounds=3, **batch(setting, point["tokens"], point["requests"]))
    result["returning"] = worker.do(commands.returning, low=setting.low, high=setting.high, rounds=5 * rounds)
    where, contexts = batch(setting, *setting.after), None
    result["after"] = []
    for _ in range(setting.pairs if rounds > 2 else 2):
        pair = worker.do(commands.after, **where, steps=16, contexts=contexts)
        result["after"].append(pair)
        contexts = None if contexts else pair["contexts"]


def batch(setting: SwitchSetting, tokens: int, requests: int) -> dict[str, int]:
    return {"low": setting.low, "high": setting.high, "requests": requests, "tokens": tokens}


def kv_tokens(setting: SwitchSetting, points: list[dict]) -> int:
    """A pool for the longest single request, and for half of the tokens at most on one replica with several."""
    replicas = setting.ranks // setting.low
    return max(max(p["tokens"] // min(p["requests"], replicas), p["tokens"] // p["requests"]) for p in points) + 8192


def idle_slots(rounds: int) -> dict[int, list[float]]:
    """Pauses without drain, by KV slots of a rank, with the same few requests alive; a tiny model, 2 ranks."""
    model, setting = models.make_random("llama", CACHE / "llama"), QUICK["2 ranks, tiny"]
    slots = (8192, 32 * 8192)
    pauses: dict[int, list[float]] = {}
    with ExitStack() as stack:
        workers: dict[int, Worker] = {}
        for size in slots:
            with suspend(*workers.values()):
                workers[size] = stack.enter_context(engine(model, setting, size))
        for _ in range(rounds):
            for size, worker in workers.items():
                with suspend(*(other for other in workers.values() if other is not worker)):
                    worker.do(commands.switches, **batch(setting, 1024, 4))
                    records = worker.do(commands.switches, **batch(setting, 1024, 4))
                pauses.setdefault(size, []).extend(r["pause_seconds"] - r["phases"]["drain"] for r in records)
    return pauses


def main() -> int:
    parser = _bench.options(__doc__, "a tiny model and two points; 2 minutes at most")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, metavar="SETTING", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--rounds", type=int, default=5, help="switches there and back at each point (default: 5)")
    args = parser.parse_args()
    launch.set_environment(quiet=True)  # which the engines inherit
    machine = _bench.about()
    if args.quick:
        model, settings, rounds = models.make_random("llama", CACHE / "llama"), QUICK, 2
    else:
        model, rounds = models.make_smollm2(CACHE / "smollm2"), args.rounds
        settings = {name: SETTINGS[name] for name in args.only or SETTINGS}
    results: dict = {}

    def save(result: dict, **more: object) -> None:
        """Save the results after each point."""
        results[name] = result
        _bench.write(args.json, machine=machine, model=model.name, results=results, **more)

    for name, setting in settings.items():
        print(f"{name}, tp{setting.low} and tp{setting.high}, {model.name}:", flush=True)
        save(compare(model, setting, rounds, save))
        figures.table(name, results[name], setting)
    pauses = {size: statistics.median(times) for size, times in idle_slots(rounds).items()}
    shown = ", ".join(f"{1e3 * seconds:.1f} ms with {size} slots" for size, seconds in pauses.items())
    print(f"idle slots, tiny model, 4 requests, 1024 tokens: {shown}")
    save(results[name], idle_slots=pauses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
