"""Rounds on an engine that takes no time: how long each turn of the event loop is; for ``control_plane.py``."""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
import random
from time import thread_time
from typing import Any

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Output, SampleId
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.rules import Rules

PATIENCE_SECONDS = 30.0
"""A round that takes longer is measured as far as it came."""


def length(sample: SampleId) -> int:
    """Of a response: short mostly, one in 25 at the limit."""
    value = random.Random(f"{sample.epoch}/{sample.index}/{sample.number}").random()
    return 400 if value > 0.96 else 1 + int(100 * value)


def admitter(mode: str, prompts: int, responses: int, rounds: int) -> Admitter:
    made = Admitter(Rules(mode=mode, num_prompts=prompts, num_responses=responses))
    feed(made, 0, 3 * rounds * prompts)
    return made


def feed(to: Admitter, first: int, count: int) -> None:
    to.feed([((0, index), {"input_ids": [1]}) for index in range(first, first + count)])


class Scripted:
    """An engine that takes nothing for a step; ``ENDS`` samples at most end in one turn of the event loop."""

    ENDS = 8

    def __init__(self) -> None:
        self._ends: list[tuple[int, str]] = []
        self._waiting: dict[str, tuple[asyncio.Future, int]] = {}
        self._now = 0

    async def begin_round(self, begun: Any) -> None:
        """Nobody asks."""

    async def end_round(self, name: str) -> None:
        """Nobody asks."""

    def updates(self) -> int:
        return 0

    async def generate(self, rid: str, prompt: Any, params: dict[str, Any]) -> Output:
        sample = SampleId(*map(int, rid.split("-")[2:]))
        tokens = length(sample) - len(prompt["input_ids"]) + 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[rid] = future, self._now
        heapq.heappush(self._ends, (self._now + tokens, rid))
        reason = await future
        made = tokens if reason else min(tokens - 1, self._now - self._waiting[rid][1])
        del self._waiting[rid]
        return Output(token_ids=[7] * made, finish_reason=reason)

    def abort(self, rid: str) -> None:
        if rid in self._waiting and not self._waiting[rid][0].done():
            self._waiting[rid][0].set_result("")

    def text(self, token_ids: list[int]) -> str:
        return ""

    def step(self) -> None:
        """The next few samples end."""
        for _ in range(self.ENDS):
            while self._ends and (self._ends[0][1] not in self._waiting or self._waiting[self._ends[0][1]][0].done()):
                heapq.heappop(self._ends)
            if self._ends:
                self._now, rid = heapq.heappop(self._ends)
                self._waiting[rid][0].set_result("stop")


class Collector:
    """Python's garbage collector: seconds that it took, and the longest pause."""

    def __init__(self) -> None:
        self.seconds = self.longest = self._begun = 0.0
        gc.callbacks.append(self._told)

    def _told(self, phase: str, about: dict) -> None:
        if phase == "start":
            self._begun = thread_time()
        else:
            taken = thread_time() - self._begun
            self.seconds += taken
            self.longest = max(self.longest, taken)


def now_of(collector: Collector) -> float:
    return thread_time() - collector.seconds


async def read(round_: RolloutRound) -> None:
    """As a client does."""
    async for _ in round_:
        pass


async def turns_of(round_: RolloutRound, engine: Scripted, collector: Collector, begun: float, cancel: bool) -> list:
    """Seconds of each turn of the event loop, without the collector's, until the round is over and freed.

    Args:
        begun: when the round was about to begin, by :func:`now_of`.
        cancel: give it up when a third of its groups have been returned.
    """
    reader, found, last = asyncio.ensure_future(read(round_)), [], begun
    third, left, gave_up = round_.admitter.state.round.target // 3, 0, thread_time() + PATIENCE_SECONDS
    while (not reader.done() or left > 0) and thread_time() < gave_up:
        await asyncio.sleep(0)
        found.append(now_of(collector) - last)
        left = round_.admitter.rules.num_prompts if round_.summary is None else left - 1
        engine.step()
        last = now_of(collector)
        state = round_.admitter.state.round
        if cancel and state is not None and not state.cancelled and len(state.taken) > third:
            round_.cancel()
    reader.cancel()
    return found


async def loop_slices(mode: str, prompts: int, responses: int, rounds: int = 3) -> dict[str, Any]:
    """Milliseconds of the longest turns of the event loop, without the collector's, and of the collector's longest.

    Rounds as the server has them, each on a copy of the job's state; one more is cancelled in the middle.
    """
    collector = Collector()
    made, engine = admitter(mode, prompts, responses, rounds + 1), Scripted()
    begins, others, cancelled = [], [], []
    for number in range(rounds + 1):
        begun = now_of(collector)
        made = Admitter(made.rules, made.snapshot())
        round_ = RolloutRound(made, engine, number, {})
        found = await turns_of(round_, engine, collector, begun, cancel=number == rounds)
        begins.append(found[0])
        (cancelled if number == rounds else others).append(max(found[1:]))
        if round_.summary is None:
            break
    gc.callbacks.clear()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return {
        "begin_turn_ms": 1e3 * max(begins), "slice_ms": 1e3 * max(others),
        "cancelled_ms": 1e3 * max(cancelled, default=math.nan), "collector_ms": 1e3 * collector.longest,
    }  # fmt: skip
