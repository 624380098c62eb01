"""What a round has to do with the event loop that it shares with others: its events, and slices of its work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sglang_pat.rollout.records import Group, Judge, More, Summary, Waiting
from sglang_pat.rollout.turns import Turn

SLICE = 16
"""Samples that are started, aborted or returned in one turn of the event loop: each takes the server 0.2 to 0.5 ms."""

WAITING_SECONDS = 30.0
"""After so long without another event a round says what it waits for."""

Event = Group | Judge | More | Summary | Turn | Waiting


def let_go(groups: list[Group]) -> None:
    """Empty this list, a few groups in each turn of the event loop: to free tens of thousands of samples takes long."""
    del groups[-SLICE:]
    if groups:
        asyncio.get_running_loop().call_soon(let_go, groups)


class Events:
    """Events on their way to whoever iterates over a round.

    Args:
        waiting: says what the round waits for.
    """

    def __init__(self, waiting: Callable[[], Waiting]) -> None:
        self._waiting = waiting
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._idle_since: float | None = None
        """When :meth:`get` was called, by the event loop's clock; None if nobody waits."""

    def put(self, event: Event | Exception) -> None:
        self._queue.put_nowait(event)

    async def get(self) -> Event | Exception:
        """The next one."""
        self._idle_since = asyncio.get_running_loop().time()
        event = await self._queue.get()
        self._idle_since = None
        return event

    async def watch(self) -> None:
        """Say what the round waits for, whenever nothing else has come for long.

        One timer: an event loop that has to drop one for each event does so for thousands of them at once.
        """
        loop = asyncio.get_running_loop()
        while True:
            due = WAITING_SECONDS + (loop.time() if self._idle_since is None else self._idle_since)
            if loop.time() >= due and self._queue.empty():
                self._idle_since = None
                self.put(self._waiting())
            await asyncio.sleep(max(0.0, due - loop.time()))
