"""A rollout on an engine that is played, in the event loop of an ``Engine``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Output, Summary
from sglang_pat.rollout.rounds import RolloutRound, always_of_use
from sglang_pat.rollout.rules import Rules

SECONDS = 60
"""Longest wait for what must come."""


class Ticking:
    """A token in each turn of the loop; the first token of the prompt is the length of the response."""

    def __init__(self) -> None:
        self.stops: dict[str, bool] = {}
        self.begun = threading.Event()
        self.idle = threading.Event()
        """Nothing runs any more."""

    async def begin_round(self, begun) -> None:
        """Nobody asks."""

    async def end_round(self, name) -> None:
        """Nobody asks."""

    def updates(self) -> int:
        return 0

    async def generate(self, rid, prompt, params) -> Output:
        length, made = prompt["input_ids"][0], 0
        if length < 0:
            raise ValueError("refused")
        self.stops[rid] = False
        self.begun.set()
        try:
            while made < length and not self.stops[rid]:
                await asyncio.sleep(0)
                made += 1
            return Output(token_ids=[7] * made, finish_reason="stop" if made == length else "")
        finally:
            del self.stops[rid]
            if not self.stops:
                self.idle.set()

    def abort(self, rid) -> None:
        if rid in self.stops:
            self.stops[rid] = True

    def text(self, token_ids) -> str:
        return ""


FOREVER = 1 << 40


def admitter(*lengths: int, **rules) -> Admitter:
    made = Admitter(Rules(**({"num_prompts": 2, "num_responses": 2, "eta_prompts": 2.0} | rules)))
    made.feed([((0, i), {"input_ids": [length]}) for i, length in enumerate(lengths)])
    return made


async def events_of(mine: Admitter, engine: Ticking, judge=None) -> AsyncGenerator[Group | Summary, None]:
    """As ``Engine.async_rollout``."""
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": FOREVER}, judge or always_of_use)
    try:
        async with aclosing(aiter(round_)) as events:
            async for event in events:
                yield event
    finally:
        round_.cancel()
        await round_.wait()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine loop"]


async def thread_of_the_loop() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()
