"""Functions of the training job that a round calls: for verdicts on groups, and for more prompts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sglang_pat.admission.records import Group
from sglang_pat.admission.rounds import Prompts

Called = Callable[[Any], Awaitable[Any]]

Judge = Callable[[Group], bool | Awaitable[bool]]
"""Whether a complete group is of use."""

MorePrompts = Callable[[int], Prompts | Awaitable[Prompts]]
"""So many prompts; fewer mean that there are no others for this round."""


@contextmanager
def beside_the_loop() -> Iterator[Callable[[Callable[[Any], Any]], Called]]:
    """Makes functions of one argument into coroutine functions that do not hold up the event loop.

    Plain functions run in one thread of their own, one call after the other; what they wait for, or compute, keeps
    neither the loop nor whoever takes the groups.  Coroutine functions run in the loop, several calls at once.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="rollout callbacks")

    def beside(function: Callable[[Any], Any]) -> Called:
        async def called(argument: Any) -> Any:
            found = await asyncio.get_running_loop().run_in_executor(thread, lambda: function(argument))
            return await found if inspect.isawaitable(found) else found

        return called

    try:
        yield beside
    finally:
        # Nobody needs the answer that may still be in the making, nor waits for it.
        thread.shutdown(wait=False, cancel_futures=True)


def always_of_use(group: Group) -> bool:
    """The verdict where nobody gives one."""
    return True


def none_left(count: int) -> Prompts:
    """The prompts where nobody gives any."""
    return []
