"""Verdicts that a function of the training job gives on complete groups."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from sglang_pat.admission.records import Group

Judge = Callable[[Group], bool | Awaitable[bool]]
"""Whether a complete group is of use."""


@contextmanager
def beside_the_loop(judge: Judge | None) -> Iterator[Callable[[Group], Awaitable[bool]]]:
    """``judge`` as a coroutine function that does not hold up the event loop.

    A plain function runs in a thread of its own, for one group after the other; what it waits for, or computes, keeps
    neither the loop nor whoever takes the groups.  A coroutine function runs in the loop, for several groups at once.
    None: every group is of use.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
    of_use = judge or _always

    async def verdict(group: Group) -> bool:
        keep = await asyncio.get_running_loop().run_in_executor(thread, lambda: of_use(group))
        return await keep if inspect.isawaitable(keep) else keep

    try:
        yield verdict
    finally:
        # Nobody needs the verdict that may still be in the making, nor waits for it.
        thread.shutdown(wait=False, cancel_futures=True)


def _always(group: Group) -> bool:
    return True
