"""What ``bench/switch.py`` has its engines do (``profiler.worker``)."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from profiler.rig import Rig
from sglang_pat.testing.server import find_rank_processes

SKIP = 2
"""Steps after a switch that are not timed: the caches are cold."""


class Memory:
    """What a switch takes on each rank beyond what is mapped already, and in the windows that KV goes through."""

    def __init__(self) -> None:
        ranks = find_rank_processes(psutil.Process().children(recursive=True))
        self._pids = [process.pid for process in ranks.values()]

    def start(self) -> None:
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark starts again from here
        self._before = [(self._read(pid, "VmRSS"), self._read(pid, "RssShmem")) for pid in self._pids]

    def extra(self) -> list[int]:
        """Bytes by rank.

        Windows count where they were made, whole, though they were there before the pause, and not where a peer has
        them mapped as well.
        """
        sizes = []
        for pid, (rss, shared) in zip(self._pids, self._before, strict=True):
            mapped = max(0, self._read(pid, "RssShmem") - shared)
            sizes.append(max(0, self._read(pid, "VmHWM") - rss - mapped) + self._windows(pid))
        return sizes

    @staticmethod
    def _windows(pid: int) -> int:
        files = [file.stat() for file in Path(f"/proc/{pid}/fd").iterdir() if "memfd:sglang_pat" in os.readlink(file)]
        seen = Counter(file.st_ino for file in files)
        # Every mapping keeps a descriptor: a peer's file is there once, its own once more.
        return next((512 * file.st_blocks for file in files if seen[file.st_ino] > 1), 0)

    @staticmethod
    def _read(pid: int, field: str) -> int:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise ValueError(field)


async def decode(rig: Rig, tasks: list, requests: int, steps: int) -> tuple[float, float]:
    """Median seconds of so many steps from now on, the mean over replicas of each step; mean context of a request."""
    await rig.wait_until_decoding(tasks, requests, steps=SKIP)
    steps_by_rank: dict[int, list[dict]] = {}
    while not steps_by_rank or any(len(of_rank) < steps for of_rank in steps_by_rank.values()):
        for step in await rig.read_trace():
            if step["tp"] == rig.tp and step["kind"] == "decode":
                steps_by_rank.setdefault(step["rank"], []).append(step)
        if all(task.done() for task in tasks):
            raise RuntimeError("the requests ended")
        await asyncio.sleep(0.01)
    rows = list(zip(*(of_rank[:steps] for of_rank in steps_by_rank.values()), strict=True))
    seconds = statistics.median(statistics.mean(step["seconds"] for step in row) for row in rows)
    return seconds, statistics.mean(step["tokens"] / step["requests"] for row in rows for step in row)


@asynccontextmanager
async def decoding(rig: Rig, tp: int, requests: int, tokens: int, answer: int):
    """A batch whose prompts are injected, not computed; tasks that decode for ``answer`` steps unless aborted."""
    await rig.reconfigure(tp)
    await rig.flush()
    prompts = [rig.sample_tokens(tokens // requests) for _ in range(requests)]
    rig.inject(prompts)
    await rig.read_trace()
    tasks = rig.send(prompts, [answer] * requests)
    try:
        yield tasks
    finally:
        await rig.abort(tasks)


async def switches(rig: Rig, low: int, high: int, requests: int, tokens: int, rounds: int = 1) -> list[dict]:
    """Records of switches there and back, with one batch: its prefill takes far longer than the switches."""
    records = []
    async with decoding(rig, low, requests, tokens, 50 * rounds) as tasks:
        await rig.wait_until_decoding(tasks, requests, steps=1)
        for target in (high, low) * rounds:
            records.append(await rig.reconfigure(target))
            await rig.wait_until_decoding(tasks, requests, steps=1)
    return records


async def lending(rig: Rig, low: int, high: int, requests: int, tokens: int, rounds: int) -> list[dict]:
    """Records of switches between two layouts: a merge, the way back, the lending of all ranks but one replica's, and
    their return."""
    records, stride = [], high // low
    async with decoding(rig, low, requests, tokens, 100 * rounds) as tasks:
        await rig.wait_until_decoding(tasks, requests, steps=1)
        for _ in range(rounds):
            for switch in (
                lambda: rig.reconfigure(high),
                lambda: rig.reconfigure(low),
                lambda: rig.engine.async_lend_ranks(stride),
                lambda: rig.engine.async_take_back_ranks(),
            ):
                records.append(await switch())
                await rig.wait_until_decoding(tasks, requests, steps=1)
    return records


async def after(
    rig: Rig, low: int, high: int, requests: int, tokens: int, steps: int, contexts: list[float] | None
) -> dict[str, list[float]]:
    """Median seconds of a step in the higher and in the lower degree, after a switch to it and static.

    Static: in a batch that began in that layout, of the same context as after the switch, or the times would differ by
    what was generated meanwhile.  ``contexts`` of the turn before: the static batches come first.
    """
    answer = 4 * (3 * steps + 3 * SKIP)

    async def static(contexts: list[float]) -> list[float]:
        times = []
        for tp, context in zip((high, low), contexts, strict=True):
            length = round(context - steps / 2 - SKIP)
            async with decoding(rig, tp, requests, length * requests, answer) as tasks:
                times.append(await decode(rig, tasks, requests, steps))
        return times

    begun = await static(contexts) if contexts else None
    switched = []
    async with decoding(rig, low, requests, tokens, answer) as tasks:
        await rig.wait_until_decoding(tasks, requests, steps=SKIP)
        for target in (high, low):
            await rig.reconfigure(target)
            switched.append(await decode(rig, tasks, requests, steps))
    begun = begun or await static([context for _, context in switched])
    return {
        "switched": [seconds for seconds, _ in switched], "static": [seconds for seconds, _ in begun],
        "contexts": [context for _, context in switched], "static_contexts": [context for _, context in begun],
    }  # fmt: skip


async def taken(rig: Rig, low: int, high: int, requests: int, tokens: int) -> dict[int, int]:
    """Bytes that a switch to each degree takes on the rank where it takes most.

    Generation is paused: decode steps take more, and would hide it.  The second time counts: pages of the pool that
    were never used are not the switch's.
    """
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager, memory, sizes = rig.engine.tokenizer_manager, Memory(), {}
    async with decoding(rig, low, requests, tokens, 100) as tasks:
        await rig.wait_until_decoding(tasks, requests)
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        for target in (high, low) * 2:
            memory.start()
            await rig.reconfigure(target)
            sizes[target] = max(memory.extra())
        await manager.continue_generation(ContinueGenerationReqInput())
    return sizes


async def returning(rig: Rig, low: int, high: int, rounds: int) -> list[float]:
    """Pauses of the return to base without live requests."""
    pauses = []
    for _ in range(rounds):
        await rig.reconfigure(high)
        pauses.append((await rig.reconfigure(low))["pause_seconds"])
    return pauses
