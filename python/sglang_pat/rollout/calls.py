"""Calls of the training job's functions (:class:`Calls`) from a round's event loop, which they do not hold up."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Calls:
    """Plain functions run in one thread of their own, one call after the other; what they wait for, or compute, keeps
    neither the loop nor whoever takes the groups.  Coroutine functions run in the loop, several calls at once.

    Args:
        thread: name of the thread.
    """

    def __init__(self, thread: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread)

    async def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """What it returns, or gives when it is awaited.

        Raises:
            RuntimeError: it raised StopIteration.
            Exception: as it does.
        """
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(argument)
        result = await asyncio.get_running_loop().run_in_executor(self._thread, _call, function, argument)
        return await result if inspect.isawaitable(result) else result

    def stop(self) -> None:
        """Drop the calls that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except StopIteration as error:  # no future can have it: who waits for one would wait for ever
        name = getattr(function, "__name__", repr(function))
        raise RuntimeError(f"{name} raised StopIteration; at the end of the data return fewer prompts") from error
