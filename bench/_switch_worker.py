"""One adaptive engine for ``bench/switch.py``, in a process of its own: commands on stdin, answers on stdout (JSON).

    python bench/_switch_worker.py MODEL [SGLang flags]
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

import psutil

from profiler import host
from profiler.rig import Rig

STEPS = 8
"""Decode steps that are timed after each switch, and in the static layout."""

SKIP = 2
"""Steps after a switch that are not: the caches are cold."""


class Memory:
    """What a switch takes on each rank beyond what is mapped already, and in the windows that KV goes through."""

    def __init__(self) -> None:
        children = psutil.Process().children(recursive=True)
        self._pids = [p.pid for p in children if p.cmdline() and p.cmdline()[0].startswith("sglang_pat::rank")]

    def start(self) -> None:
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark starts again from here
        self._before = [(self._read(pid, "VmRSS"), self._read(pid, "RssShmem")) for pid in self._pids]

    def extra(self) -> list[int]:
        """Bytes by rank.

        Windows count where they were made, whole, though they were there before the pause, and not where a peer has
        them mapped as well.
        """
        found = []
        for pid, (rss, shared) in zip(self._pids, self._before, strict=True):
            mapped = max(0, self._read(pid, "RssShmem") - shared)
            found.append(max(0, self._read(pid, "VmHWM") - rss - mapped) + self._windows(pid))
        return found

    @staticmethod
    def _windows(pid: int) -> int:
        files = [file for file in Path(f"/proc/{pid}/fd").iterdir() if "memfd:sglang_pat" in os.readlink(file)]
        return sum(512 * file.stat().st_blocks for file in files)

    @staticmethod
    def _read(pid: int, field: str) -> int:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise ValueError(field)


async def decode(rig: Rig, tasks: list, requests: int) -> list[float]:
    """Seconds of :data:`STEPS` steps from now on, the mean over replicas of each step."""
    await rig.until_decoding(tasks, requests, steps=SKIP)
    steps: dict[int, list[float]] = {}
    while not steps or any(len(mine) < STEPS for mine in steps.values()):
        for step in await rig.trace():
            if step["tp"] == rig.tp and step["kind"] == "decode":
                steps.setdefault(step["rank"], []).append(step["seconds"])
        if all(task.done() for task in tasks):
            raise RuntimeError("the requests ended")
        await asyncio.sleep(0.01)
    return [statistics.mean(row) for row in zip(*(mine[:STEPS] for mine in steps.values()), strict=True)]


async def switches(rig: Rig, memory: Memory, low: int, high: int, requests: int, tokens: int, rounds: int) -> list:
    """There and back with the same live requests; their prompts are injected, not computed."""
    await rig.reconfigure(low)
    await rig.flush()
    prompts = [rig.tokens(tokens // requests) for _ in range(requests)]
    rig.inject(prompts)
    await rig.trace()
    tasks = rig.send(prompts, [4 * rounds * (STEPS + 3 * SKIP)] * requests)
    made = []
    try:
        await decode(rig, tasks, requests)
        for _ in range(rounds):
            for target in (high, low):
                memory.start()
                record = await rig.reconfigure(target)
                extra = memory.extra()
                made.append({"record": record, "extra": extra, "steps": await decode(rig, tasks, requests)})
    finally:
        await rig.abort(tasks)
    return made


async def static(rig: Rig, tp: int, requests: int, tokens: int) -> list[float]:
    """Steps of the same batch in a layout that the engine was in from the start."""
    await rig.reconfigure(tp)
    await rig.flush()
    prompts = [rig.tokens(tokens // requests) for _ in range(requests)]
    rig.inject(prompts)
    await rig.trace()
    tasks = rig.send(prompts, [4 * (STEPS + 3 * SKIP)] * requests)
    try:
        return await decode(rig, tasks, requests)
    finally:
        await rig.abort(tasks)


async def returning(rig: Rig, low: int, high: int, rounds: int) -> list[float]:
    """Pauses of the return to base without live requests."""
    pauses = []
    for _ in range(rounds):
        await rig.reconfigure(high)
        pauses.append((await rig.reconfigure(low))["pause_seconds"])
    return pauses


async def prefill(rig: Rig, requests: int, tokens: int) -> float:
    """Seconds until each of these requests, all computed, has its first token."""
    begun = time.monotonic()
    await rig.finish(rig.send([rig.tokens(tokens // requests) for _ in range(requests)], [1] * requests))
    return time.monotonic() - begun


async def serve(engine, answer) -> None:
    rig, memory = Rig(engine, temperature=0.0), Memory()
    await rig.connect()
    answer({"ready": os.getpid()})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        match command.pop("do"):
            case "switches":
                answer(await switches(rig, memory, **command))
            case "static":
                answer(await static(rig, **command))
            case "returning":
                answer(await returning(rig, **command))
            case "prefill":
                answer(await prefill(rig, **command))


def main() -> int:
    model, *flags = sys.argv[1:]
    # Whatever the engine prints goes to stderr: stdout is for answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value) -> None:
        print(json.dumps(value), file=out, flush=True)

    engine = host.start(host.server_args(model, flags))
    try:
        host.run(engine, lambda: serve(engine, answer))
    finally:
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
