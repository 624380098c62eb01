"""Functions of the training job that a round calls: for verdicts on groups, and for more prompts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from sglang_pat.rollout.records import Group, Judge, Key, More, Summary

Prompts = Sequence[tuple[Sequence[int], Any]]
"""(key, prompt) of each, see :meth:`Admitter.feed`."""

Verdicts = Callable[[Group], bool | Awaitable[bool]]
"""Whether a complete group is of use."""

MorePrompts = Callable[[int], Prompts | Awaitable[Prompts]]
"""So many prompts; fewer mean that there are no others for this round."""


def always_of_use(group: Group) -> bool:
    """The verdict where nobody gives one."""
    return True


def none_left(count: int) -> Prompts:
    """The prompts where nobody gives any."""
    return []


class Asking(Protocol):
    """The round that asks."""

    summary: Summary | None

    def judge(self, key: Key, keep: bool) -> object: ...

    def feed(self, prompts: Prompts) -> object: ...

    def no_more(self) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Callbacks:
    """Answers a round in place of whoever iterates over it: as soon as it asks, and without holding up the event loop.

    Plain functions run in one thread of their own, one call after the other; what they wait for, or compute, keeps
    neither the loop nor whoever takes the groups.  Coroutine functions run in the loop, several calls at once.  What
    they raise ends the round.  To be used as a context: its end is that of the thread.
    """

    def __init__(self, verdicts: Verdicts = always_of_use, more: MorePrompts = none_left) -> None:
        self._verdicts, self._more = verdicts, more
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout callbacks")
        self._calls: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Callbacks:
        return self

    def __exit__(self, *_: Any) -> None:
        # Nobody needs the answer that may still be in the making, nor waits for it.
        self._thread.shutdown(wait=False, cancel_futures=True)

    def answer(self, round_: Asking, event: Judge | More) -> None:
        """Begin to answer an event of the round."""
        task = asyncio.ensure_future(self._answered(round_, event))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def stop(self) -> None:
        """Nobody needs the answers under way any more."""
        for call in self._calls:
            call.cancel()

    async def _answered(self, round_: Asking, event: Judge | More) -> None:
        try:
            match event:
                case Judge(group):
                    await self._judged(round_, group)
                case More(prompts):
                    await self._fed(round_, prompts)
        except asyncio.CancelledError as error:
            if round_.summary is None:  # not by stop(): what it waited for was
                round_.fail(RuntimeError(f"a callback was cancelled: {error}"))
            raise
        except Exception as error:
            round_.fail(error)

    async def _judged(self, round_: Asking, group: Group) -> None:
        round_.judge(group.key, await self._called(self._verdicts, group))

    async def _fed(self, round_: Asking, count: int) -> None:
        prompts = await self._called(self._more, count)
        round_.feed(prompts)
        if len(prompts) < count:
            round_.no_more()

    async def _called(self, function: Callable[[Any], Any], argument: Any) -> Any:
        found = await asyncio.get_running_loop().run_in_executor(self._thread, _call, function, argument)
        return await found if inspect.isawaitable(found) else found


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except StopIteration as error:  # no future can have it: who waits for one would wait for ever
        name = getattr(function, "__name__", repr(function))
        raise RuntimeError(f"{name} raised StopIteration; at the end of the data return fewer prompts") from error
