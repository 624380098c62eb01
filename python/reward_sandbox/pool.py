"""A reward function in processes of its own, each call with a hard limit: it can neither end a job nor hold it up.

A process has one call at a time.  It is killed if the call takes too long, or more memory than it may, and another one
is started.  What a killed one had started ends with it (:mod:`.guard`).  A call that waits, as for a remote judge, or
that has run for long, holds no place: others start beside it.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import ctypes
import enum
import inspect
import math
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from reward_sandbox import guard, program_runner
from reward_sandbox.runs import format_one_line

STARTS = ("fork", "spawn")
"""Ways to start a process.  ``fork``: at once, with any function.  ``spawn``: clean, for a function that uses CUDA or
the threads of torch; it has to be one that can be pickled, and is imported anew each time."""

START_SECONDS = 60.0
"""Longest start of a process."""
LOOK_SECONDS = 0.02
"""Time between two looks at the calls that hold a place, while others wait for one.  The rest is looked at every
fifth time."""
LONG = 0.05
"""Share of its limit after which a call holds no place any more: perhaps it never ends."""
TRIES = 2
"""Number of tries of a call whose process dies: the kernel may have killed it when memory was short."""
REASON_LENGTH = 200

_PR_SET_PDEATHSIG = 1


class Failure(enum.StrEnum):
    """Why a call gave no score."""

    LATE = "late"
    """The call took longer than its limit."""
    RAISED = "raised"
    DIED = "died"
    """The call's process died in each try."""
    MEMORY = "memory"
    """The call wanted more memory than it may have, in each try."""
    INVALID = "invalid"
    """The function returned no finite number, nor a mapping with one as its ``score``."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Result of a call of a reward function.

    Attributes:
        value: finite score; the pool's ``failed_reward`` if there is a ``failure``.
        info: the mapping that the function returned, if it was one.
        reason: the failure in one line.
        waiting: seconds until a process was free.
        running: seconds in that process.
    """

    value: float
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: Failure | None = None
    reason: str = ""
    waiting: float = 0.0
    running: float = 0.0


class _Call:
    """A call that waits for its turn, or has had it."""

    def __init__(self, limit: float) -> None:
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.limit, self.begun = limit, math.inf
        self.process: _Process | None = None
        self.holds = True
        """Whether the call holds a place."""

    def look(self) -> None:
        long = time.monotonic() - self.begun > LONG * self.limit
        state = program_runner.look(self.process.pid, itself=True) if self.process is not None else None
        self.holds = not long and (state is None or state.ready > 0)


class RewardPool:
    """Pool of processes that call ``function``.

    A coroutine function is called in the event loop that asks, as often at once as it is asked for.
    It is given up at its limit, too.  One that does not give the loop back stops everything.

    Args:
        processes: most calls at once that compute.
        extra: most calls at once beside these: calls that wait for something else than a core, or that have taken
            more than :data:`LONG` of their limit.
        limit: most seconds of a call.
        memory: bytes that a process may take beyond those that it has at its start.
        failed_reward: value of a call that fails.
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
        extra: int = 32,
        limit: float = 30.0,
        memory: int = 4 << 30,
        failed_reward: float = 0.0,
        start: str = "fork",
        nice: int = 0,
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes is {processes}, must be 1 or more")
        if extra < 0:
            raise ValueError(f"extra is {extra}, must be 0 or more")
        if not 0 < limit < math.inf:
            raise ValueError(f"limit is {limit}, must be seconds above 0")
        if not 1 <= memory < 1 << 62:
            raise ValueError(f"memory is {memory}, must be bytes, 1 or more")
        if not math.isfinite(failed_reward):
            raise ValueError(f"failed_reward is {failed_reward}, must be a finite number")
        if start not in STARTS:
            raise ValueError(f"start is {start!r}, must be {' or '.join(STARTS)}")
        self._in_loop = inspect.iscoroutinefunction(function)
        if start == "spawn" and not self._in_loop:
            _check_pickling(function)
        self._function, self._nice, self._memory = function, nice, int(memory)
        self._limit, self._failed_reward = limit, failed_reward
        self._processes, self._most = processes, processes + extra
        self._context: Any = multiprocessing.get_context(start)
        self._queue: collections.deque[_Call] = collections.deque()
        self._calls: set[_Call] = set()
        self._idle: list[_Process] = []
        self._looking: asyncio.Task[None] | None = None
        self._guard: guard.Guard | None = None

    async def score(
        self,
        arguments: Mapping[str, Any],
        limit: float | None = None,
        more: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    ) -> Reward:
        """Call the function with ``arguments`` by name; whatever it does, this returns a score.

        Cancelling this ends the call, and its process.

        Args:
            limit: seconds of this call, if not the pool's.
            more: function that gives further arguments, called as soon as a process is free.
        """
        arrival, limit = time.monotonic(), limit or self._limit
        async with contextlib.nullcontext() if self._in_loop else self._take_turn(limit) as call:
            begun = time.monotonic()
            inputs = {**arguments, **(await more() if more is not None else {})}
            if call is None:
                return self._read(await self._ask_in_loop(inputs, limit), arrival, begun)
            try:
                payload = pickle.dumps(inputs)
            except Exception as error:
                reason = f"its arguments cannot be pickled: {_describe(error)}"
                return self._read((Failure.INVALID, reason), arrival, begun)
            for attempt in range(TRIES):
                answer = await self._ask_a_process(call, payload, new=attempt > 0)
                if not (isinstance(answer, tuple) and answer[0] in (Failure.DIED, Failure.MEMORY)):
                    break
            return self._read(answer, arrival, begun)

    async def close(self) -> None:
        """End the processes, and what they have started."""
        self._idle.clear()
        for process in [one for one in _running if one.idle is self._idle]:
            await process.kill()
        guarding, self._guard = self._guard, None
        if guarding is not None:
            await asyncio.to_thread(guarding.close)

    @contextlib.asynccontextmanager
    async def _take_turn(self, limit: float) -> AsyncIterator[_Call]:
        call = _Call(limit)
        self._queue.append(call)
        self._admit()
        try:
            await call.turn
            yield call
        finally:
            self._calls.discard(call)
            self._admit()

    def _admit(self) -> None:
        """Let waiting calls begin, first come, first served, as long as there are places."""
        while self._queue and len(self._calls) < self._most:
            if sum(call.holds for call in self._calls) >= self._processes:
                break
            call = self._queue.popleft()
            if not call.turn.cancelled():
                self._calls.add(call)
                call.turn.set_result(None)
        if self._queue and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Look again and again who holds a place, as long as somebody waits for one."""
        turn = 0
        while self._queue:
            await asyncio.sleep(LOOK_SECONDS)
            turn += 1
            for call in self._calls:
                if call.holds or turn % 5 == 0:
                    call.look()
            self._admit()

    async def _ask_a_process(self, call: _Call, payload: bytes, new: bool) -> _Answer:
        try:
            process = self._idle.pop() if self._idle and not new else self._start()
        except OSError as error:  # the machine is short of processes, or this one of files
            return Failure.DIED, f"its process was not started: {_describe(error)}"
        kept = False
        try:
            if not await process.wait_until_ready():
                code = await process.kill()
                return Failure.DIED, f"its process ended with code {code}, or was not there in {START_SECONDS:g} s"
            call.begun, call.process = time.monotonic(), process
            answer = await process.ask(payload, call.limit)
            kept = isinstance(answer, bytes) or answer[0] in (Failure.RAISED, Failure.INVALID)
            return answer
        finally:
            call.process = None
            if kept and process in _running:
                self._idle.append(process)
            else:
                process.end()

    def _start(self) -> _Process:
        if self._guard is None:
            self._guard = guard.Guard(self._context)
        arguments = self._function, self._nice, self._memory, self._guard.writer
        return _Process(self._context, arguments, self._idle)

    async def _ask_in_loop(self, arguments: Mapping[str, Any], limit: float) -> _Answer:
        task = asyncio.ensure_future(self._call_in_loop(arguments))
        try:
            await asyncio.wait({task}, timeout=limit)
        finally:
            task.cancel()  # also when the caller is cancelled
        if not task.done():
            return Failure.LATE, f"longer than {limit:g} s"
        if task.cancelled():
            return Failure.RAISED, "CancelledError"
        error = task.exception()
        return task.result() if error is None else (Failure.RAISED, _describe(error))

    async def _call_in_loop(self, arguments: Mapping[str, Any]) -> _Answer:
        try:
            return _pack(await self._function(**arguments))
        except (SystemExit, KeyboardInterrupt) as error:  # a task would end the loop with it
            return Failure.RAISED, _describe(error)

    def _read(self, answer: _Answer, arrival: float, begun: float) -> Reward:
        waiting, running = begun - arrival, time.monotonic() - begun
        if isinstance(answer, bytes):
            try:
                value, info = pickle.loads(answer)
                return Reward(value=value, info=info, waiting=waiting, running=running)
            except Exception as error:
                answer = Failure.INVALID, f"what it returned cannot be unpickled: {_describe(error)}"
        failure, reason = answer
        return Reward(value=self._failed_reward, failure=failure, reason=reason, waiting=waiting, running=running)


_Answer = bytes | tuple[Failure, str]
"""Pickled number and other returned values; or the failure and its reason."""
_SIZE = struct.Struct(">Q")
_running: set[_Process] = set()
"""All live processes, also those of a pool that is gone and that nobody closed: else nobody would end them."""


@atexit.register
def _end_all() -> None:
    """End all processes before multiprocessing waits for them."""
    for process in list(_running):
        if process.owner == os.getpid():  # a child may have been forked since
            process.end()


class _Process:
    """A process of a pool.

    Its end is seen by the kernel's handle of it: a child that it leaves may hold each of its pipes open.

    Attributes:
        idle: processes of its pool without a call; it leaves them when it ends.
    """

    def __init__(self, context: Any, arguments: tuple[Any, ...], idle: list[_Process]) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._process = context.Process(target=_serve, args=(theirs, *arguments))
        try:
            self._process.start()
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.pid: int = self._process.pid
        self.idle = idle
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._fd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._fd, self._note_end)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        _running.add(self)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._process.join()
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()
        _running.discard(self)
        if self in self.idle:
            self.idle.remove(self)
        self._ended.set_result(self._process.exitcode)

    def end(self) -> None:
        if not self._ended.done():
            self._process.kill()

    async def kill(self) -> int:
        """End the process; return its exit code once it has ended."""
        self.end()
        return await asyncio.shield(self._ended)

    async def wait_until_ready(self) -> bool:
        """Whether the process has said that it is ready; False if it has ended or is late."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket)
            return await self._wait_for(self._receive(), START_SECONDS) is not None
        return True

    async def ask(self, payload: bytes, limit: float) -> _Answer:
        """The function's answer to its arguments.  After a failure that is not its own the process has to end."""
        answer = await self._wait_for(self._exchange(payload), limit)
        if answer is not None:
            return pickle.loads(answer)
        if self._gone:
            return Failure.DIED, f"its process ended with code {await self.kill()}"
        return Failure.LATE, f"longer than {limit:g} s"

    async def _wait_for(self, answer: Any, seconds: float) -> bytes | None:
        """The answer; None if it is late, or (``_gone``) the process has ended or closed its pipe."""
        asking = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({asking, self._ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._gone = asking.done() or self._ended.done()
            return asking.result() if asking.done() and asking.exception() is None else None
        finally:
            asking.cancel()

    async def _exchange(self, payload: bytes) -> bytes:
        assert self._streams
        self._streams[1].write(_SIZE.pack(len(payload)) + payload)
        await self._streams[1].drain()
        return await self._receive()

    async def _receive(self) -> bytes:
        assert self._streams
        (size,) = _SIZE.unpack(await self._streams[0].readexactly(_SIZE.size))
        return await self._streams[0].readexactly(size)


# -- in a process ------------------------------------------------------------------------------------------


def _serve(channel: socket.socket, function: Callable[..., Any], nice: int, memory: int, writer: Connection) -> None:
    """Answer until nobody asks any more."""
    signal.set_wakeup_fd(-1)  # of the event loop that this process was forked from
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(nice)
    guard.join(writer.fileno())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a function that hangs does not outlive its job
    with open("/proc/self/status") as status:
        has = sum(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (has + memory, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    late = Failure.MEMORY, f"more than {memory / (1 << 20):.0f} MiB (setting memory)"
    me = os.getpid()
    with channel, channel.makefile("rwb") as file:
        _write(file, b"")
        while head := file.read(_SIZE.size):
            try:
                answer = _call(function, file.read(*_SIZE.unpack(head)))
            except MemoryError as error:
                error.__traceback__ = None  # what the function had is free then
                answer = late
            if os.getpid() != me:
                os._exit(1)  # a child of the function's, which has come back
            _write(file, pickle.dumps(answer))


def _write(file: Any, data: bytes) -> None:
    file.write(_SIZE.pack(len(data)) + data)
    file.flush()


def _call(function: Callable[..., Any], payload: bytes) -> _Answer:
    try:
        return _pack(function(**pickle.loads(payload)))
    except MemoryError:
        raise
    except BaseException as error:  # SystemExit, too
        return Failure.RAISED, _describe(error)


def _pack(result: Any) -> _Answer:
    try:
        info: dict[str, Any] = dict(result) if isinstance(result, Mapping) else {}
        score: Any = info.get("score") if isinstance(result, Mapping) else result
        if isinstance(score, (str, bytes)) or not math.isfinite(value := float(score)):
            raise ValueError("no finite number")
        return pickle.dumps((value, info))
    except MemoryError:
        raise
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
    """The value as one line, whatever the method of its class does."""
    try:
        return " ".join(show(value).split())[:REASON_LENGTH]
    except Exception:
        return type(value).__name__
