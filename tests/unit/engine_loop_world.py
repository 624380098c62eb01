"""A rollout on an engine that is played, in the event loop of an ``Engine``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Output, Summary
from sglang_pat.rollout.rounds import RolloutRound, keep_every_group

from . import rounds_world
from .rounds_world import FOREVER, Played

SECONDS = 60
"""Longest wait for what must come."""


class Ticking(Played):
    """An engine that tells other threads: ``begun``, and ``idle`` when nothing runs any more."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.idle = threading.Event(), threading.Event()

    async def generate(self, rid, prompt, params) -> Output:
        self.begun.set()
        try:
            return await super().generate(rid, prompt, params)
        finally:
            if not self.running:
                self.idle.set()


def admitter(*lengths: int, **rules: Any) -> Admitter:
    return rounds_world.admitter(*lengths, end=False, eta_prompts=2.0, **rules)


async def list_events(mine: Admitter, engine: Ticking, judge=None) -> AsyncGenerator[Group | Summary, None]:
    """Stands in for ``Engine.async_rollout``."""
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": FOREVER}, judge or keep_every_group)
    try:
        async with aclosing(aiter(round_)) as events:
            async for event in events:
                yield event
    finally:
        round_.cancel()
        await round_.wait()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine loop"]


async def get_thread_of_the_loop() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()
