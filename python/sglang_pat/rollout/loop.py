"""The event loop of an ``Engine`` (:class:`EngineLoop`).

SGLang runs its loop inside each call, in the thread of the caller, and nobody runs it between calls.  So does this one,
but a rollout has it run in a thread of its own (:meth:`EngineLoop.iterate`).  Calls made meanwhile, in any thread, are
answered by whoever runs it.  When nobody is inside any more, the thread ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

INSIDE = "this call waits for the engine's event loop and was made inside that loop; await its async_… form there"
END_SECONDS = 1.0
"""Longest that :meth:`EngineLoop.end` waits for the thread: the interpreter may be about to exit."""


class EngineLoop(uvloop.Loop):
    """An event loop that one thread at a time runs: the first that comes, or a thread of its own.  All others that are
    inside ask that one."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.RLock()
        """Lock that is held while it is decided who runs the loop."""
        self._inside = 0
        """Number of calls and rollouts under way."""
        self._thread: threading.Thread | None = None
        self._asked: set[Future[Any]] = set()
        self._iterated: set[AsyncGenerator[Any, None]] = set()
        """Generators held here too: else they would be garbage together with who iterates, and be closed twice at
        once."""
        self._ended = False

    def run_until_complete(self, future: Awaitable[Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What ``future`` gives.  Ctrl-C while another thread runs the loop cancels it.

        Raises:
            RuntimeError: called inside this loop, which would wait for itself; or after :meth:`end`.
        """
        if self._is_loop_thread() or self._ended:
            if asyncio.iscoroutine(future):
                future.close()
            raise _shut_down() if self._ended else RuntimeError(INSIDE)
        with self._turn:
            alone = not self._inside and not self.is_running()
            self._inside += 1
        try:
            return super().run_until_complete(future) if alone else self._run_in_loop(future)
        finally:
            self._leave(ran=alone)

    def iterate(self, events: AsyncGenerator[T, None]) -> Iterator[T]:
        """What ``events`` gives.  The loop goes on between two of them, whatever the caller does meanwhile.

        Left before their end, ``events`` are closed, and that is waited for.
        """
        with self._turn:
            if not self._inside and not self.is_running():
                self._start()
            self._inside += 1
            self._iterated.add(events)
        try:
            while True:
                try:
                    yield self.run_until_complete(anext(events))
                except StopAsyncIteration:
                    return
        finally:
            if self._is_loop_thread():  # as garbage, which any thread may collect: this one must not wait for itself
                threading.Thread(target=self._close, args=(events,), daemon=True).start()
            else:
                self._close(events)

    def end(self) -> None:
        """End the thread, as the engine is gone: whoever waits gets an error."""
        self._ended = True
        for answer in list(self._asked):
            _set_answer(answer, error=_shut_down())
        if self._thread is not None and not self._is_loop_thread():
            self.call_soon_threadsafe(self.stop)
            self._thread.join(END_SECONDS)

    # -- inside ----------------------------------------------------------------------------------------

    def _is_loop_thread(self) -> bool:
        """Whether this thread runs the loop."""
        return asyncio._get_running_loop() is self

    def _start(self) -> None:
        # A daemon: a program that ends with an exception does not wait for its round.
        self._thread = threading.Thread(target=self.run_forever, name="engine loop", daemon=True)
        self._thread.start()

    def _leave(self, ran: bool = False) -> None:
        with self._turn:
            self._inside -= 1
            if self._ended:
                return
            if self._inside and ran:
                self._start()  # for those who have asked it
            elif not self._inside and self._thread is not None:
                self.call_soon_threadsafe(self.stop)
                self._thread.join()
                self._thread = None

    def _close(self, events: AsyncGenerator[Any, None]) -> None:
        try:
            if not self._ended:
                self.run_until_complete(events.aclose())
                self._iterated.discard(events)
        finally:
            self._leave()

    def _run_in_loop(self, future: Awaitable[Any]) -> Any:
        """Have whoever runs the loop call the function."""
        answer: Future[asyncio.Future[Any]] = Future()
        tasks: list[asyncio.Future[Any]] = []

        def begin() -> None:
            tasks.append(asyncio.ensure_future(future, loop=self))
            tasks[0].add_done_callback(lambda task: _set_answer(answer, task))

        self._asked.add(answer)
        self.call_soon_threadsafe(begin)
        try:
            return answer.result().result()
        except KeyboardInterrupt:
            self.call_soon_threadsafe(lambda: tasks[0].cancel())
            wait([answer])
            raise
        finally:
            self._asked.discard(answer)


def _shut_down() -> RuntimeError:
    return RuntimeError("the engine was shut down; make another one")


def _set_answer(answer: Future[Any], result: Any = None, error: Exception | None = None) -> None:
    """Set the answer unless there is one already."""
    if not answer.done():
        answer.set_exception(error) if error is not None else answer.set_result(result)
