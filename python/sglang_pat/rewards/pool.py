"""A reward function in processes of its own, each call with a hard limit: it can neither end a job nor hold it up.

``pebble`` has the processes: it kills one whose call takes too long, and starts another.  What a killed one had started
ends with it (:mod:`.guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.common import CONSTS

from sglang_pat.errors import format_one_line
from sglang_pat.rewards import guard

STARTS = ("fork", "spawn")
"""How a process starts.  ``fork``: at once, with any function.  ``spawn``: clean, for a function that uses CUDA or the
threads of torch; it has to be one that can be pickled, and is imported anew each time."""

TERM_SECONDS = 0.1
"""Between SIGTERM and SIGKILL; all other calls wait meanwhile."""
START_SECONDS = 60.0
"""A call that has no answer so long after its limit was never begun: the processes are made anew."""
TRIES = 2
"""Of a call whose process dies: it may have been killed from outside, as by the kernel when memory is short."""
REASON_LENGTH = 200

_PR_SET_PDEATHSIG = 1


class Failure(enum.StrEnum):
    """Why a call gave no score."""

    LATE = "late"
    """It took longer than the limit."""
    RAISED = "raised"
    DIED = "died"
    """Its process did, each time."""
    INVALID = "invalid"
    """It returned no finite number, nor a mapping with one as its ``score``."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What a call of a reward function gave.

    Attributes:
        value: finite; the pool's ``failed_reward`` if there is a ``failure``.
        info: the mapping that the function returned, if it was one.
        reason: of the failure, one line.
        waiting: seconds until a process was free.
        running: seconds in it.
    """

    value: float
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    reason: str = ""
    waiting: float = 0.0
    running: float = 0.0


class RewardPool:
    """Calls ``function`` in ``processes``; a coroutine function in the event loop that asks, as many at once as ask.

    A coroutine function is given up at its limit, too.  One that does not give the loop back stops everything.

    Args:
        limit: seconds of a call, at most.
        failed_reward: of a call that fails.
        start: one of :data:`STARTS`.
        nice: how much other processes go before these, 0 to 19.

    Raises:
        ValueError: one line: a wrong value, or a function that cannot be pickled with ``spawn``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        processes: int,
        limit: float = 30.0,
        failed_reward: float = 0.0,
        start: str = "fork",
        nice: int = 0,
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes is {processes}, must be 1 or more")
        if not 0 < limit < math.inf:
            raise ValueError(f"limit is {limit}, must be seconds above 0")
        if not math.isfinite(failed_reward):
            raise ValueError(f"failed_reward is {failed_reward}, must be a finite number")
        if start not in STARTS:
            raise ValueError(f"start is {start!r}, must be {' or '.join(STARTS)}")
        self._in_loop = inspect.iscoroutinefunction(function)
        if start == "spawn" and not self._in_loop:
            _check_pickling(function)
        CONSTS.term_timeout = TERM_SECONDS
        self._function, self._nice = function, nice
        self._limit, self._failed_reward = limit, failed_reward
        self._processes = processes
        self._context: Any = multiprocessing.get_context(start)
        self._free = asyncio.Semaphore(processes)
        """pebble starts a call that was cancelled before its turn, and kills the process that it is in."""
        self._pool: tuple[ProcessPool, guard.Guard] | None = None

    async def score(
        self,
        arguments: Mapping[str, Any],
        limit: float | None = None,
        more: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ) -> Reward:
        """Call the function with ``arguments`` by name; whatever it does, this returns a score.

        Cancelling this ends the call, and its process.

        Args:
            limit: of this call, if it has one of its own.
            more: gives further arguments; asked as soon as a process is free.
        """
        asked, limit = time.monotonic(), limit or self._limit
        async with contextlib.nullcontext() if self._in_loop else self._free:
            begun = time.monotonic()
            given = {**arguments, **(await more() if more is not None else {})}
            if self._in_loop:
                return self._read(await self._ask_in_loop(given, limit), asked, begun)
            try:
                payload = pickle.dumps(given)
            except Exception as error:
                reason = f"its arguments cannot be pickled: {_describe(error)}"
                return self._read((Failure.INVALID, reason), asked, begun)
            for _ in range(TRIES):
                answer = await self._ask_a_process(payload, limit)
                if not (isinstance(answer, tuple) and answer[0] is Failure.DIED):
                    break
            return self._read(answer, asked, begun)

    async def close(self) -> None:
        """End the processes, and what they have started."""
        made, self._pool = self._pool, None
        if made is not None:
            pool, guarding = made
            pool.stop()
            await asyncio.to_thread(pool.join)
            await asyncio.to_thread(guarding.close)

    async def _ask_a_process(self, payload: bytes, limit: float) -> _Answer:
        pool = await self._get_pool()
        try:
            future = asyncio.wrap_future(pool.schedule(_call, args=(payload,), timeout=limit))
        except RuntimeError as error:  # it broke a moment ago
            return Failure.DIED, format_one_line(error)
        if not await _wait(future, limit + START_SECONDS):
            await self.close()
            return Failure.DIED, f"no process took it in {START_SECONDS:g} s"
        error = future.exception()
        if isinstance(error, TimeoutError):
            return Failure.LATE, f"longer than {limit:g} s"
        if isinstance(error, ProcessExpired):
            return Failure.DIED, f"its process ended with code {error.exitcode}"
        return future.result() if error is None else (Failure.DIED, _describe(error))

    async def _ask_in_loop(self, arguments: Mapping[str, Any], limit: float) -> _Answer:
        task = asyncio.ensure_future(self._function(**arguments))
        if not await _wait(task, limit):
            return Failure.LATE, f"longer than {limit:g} s"
        if task.cancelled():
            return Failure.RAISED, "CancelledError"
        error = task.exception()
        return _pack(task.result()) if error is None else (Failure.RAISED, _describe(error))

    async def _get_pool(self) -> ProcessPool:
        """pebble gives a pool up when a process dies that has nothing to do."""
        if self._pool is not None and not self._pool[0].active:
            await self.close()
        if self._pool is None:
            guarding = guard.Guard(self._context)
            given = self._function, self._nice, guarding.writer
            pool = ProcessPool(self._processes, initializer=_begin, initargs=given, context=self._context)
            self._pool = pool, guarding
        return self._pool[0]

    def _read(self, answer: _Answer, asked: float, begun: float) -> Reward:
        waiting, running = begun - asked, time.monotonic() - begun
        if isinstance(answer, bytes):
            try:
                value, info = pickle.loads(answer)
                return Reward(value=value, info=info, waiting=waiting, running=running)
            except Exception as error:
                answer = Failure.INVALID, f"what it returned cannot be unpickled: {_describe(error)}"
        failure, reason = answer
        return Reward(value=self._failed_reward, failure=failure, reason=reason, waiting=waiting, running=running)


_Answer = bytes | tuple[Failure, str]
"""A number and what else was returned, pickled; or why there is none.  No other object of the function's leaves its
process: one that cannot be unpickled would stop pebble."""


async def _wait(future: Awaitable[Any], seconds: float) -> bool:
    """Whether it is done after so long; else, and if whoever asks is cancelled, it is cancelled."""
    task = asyncio.ensure_future(future)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        return bool(done)
    finally:
        task.cancel()


# -- in a process ------------------------------------------------------------------------------------------

_function: Callable[..., Any]


def _begin(function: Callable[..., Any], nice: int, writer: Connection) -> None:
    global _function
    _function = function
    os.nice(nice)
    guard.join(writer.fileno())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a function that hangs does not outlive its job


def _call(payload: bytes) -> _Answer:
    try:
        return _pack(_function(**pickle.loads(payload)))
    except BaseException as error:  # SystemExit, too
        return Failure.RAISED, _describe(error)


def _pack(result: Any) -> _Answer:
    try:
        info: dict[str, Any] = dict(result) if isinstance(result, Mapping) else {}
        found: Any = info.get("score") if isinstance(result, Mapping) else result
        if isinstance(found, (str, bytes)) or not math.isfinite(value := float(found)):
            raise ValueError("no finite number")
        return pickle.dumps((value, info))
    except Exception as error:
        return Failure.INVALID, f"it returned {type(result).__name__} {_shorten(result)}: {_describe(error)}"


def _check_pickling(function: Callable[..., Any]) -> None:
    try:
        pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"start is 'spawn', for which {_shorten(function)} cannot be pickled ({_describe(error)}): define it at "
            "the top of a module that can be imported, or set start to 'fork'"
        ) from None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_shorten(error, format_one_line)}"


def _shorten(value: Any, show: Callable[[Any], str] = repr) -> str:
    """In one line, whatever its own class makes of it."""
    try:
        return " ".join(show(value).split())[:REASON_LENGTH]
    except Exception:
        return type(value).__name__
