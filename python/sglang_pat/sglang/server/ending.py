"""How an engine ends on a signal.

SIGTERM and SIGINT: running requests are aborted, so that their clients get what there is; then whoever handled the
signal before (uvicorn, in a server) goes on, and ``launch_server`` ends the processes.  In a script with ``Engine``,
where nobody handled it, a signal keeps its default.  SIGQUIT, which a child sends that cannot go on: everything ends.

The handlers are the process's own and not the event loop's: those of a loop act only while the main thread runs it, and
in a rollout of an ``Engine`` another one does.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.tokenizer_manager import SignalHandler

from sglang_pat.sglang.launch import folder, processes

if TYPE_CHECKING:
    from sglang_pat.sglang.server.tokenizer import AdaptiveTokenizerManager

logger = logging.getLogger(__name__)

ABORT_SECONDS = 3
"""Longest that requests may take to be aborted: a switch may be under way."""
ANSWER_SECONDS = 3
"""Longest that clients may take to read the end of their answers; SGLang looks after a stream for two more."""
Handlers = dict[int, Any]
"""By signal number, as ``signal.getsignal`` returns them."""


class EndingHandler(SignalHandler):
    """SGLang's, but the end after a child's failure leaves nothing behind; SIGTERM is :class:`Ending`'s."""

    def running_phase_sigquit_handler(self, signum=None, frame=None) -> None:
        manager = self.tokenizer_manager
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        manager.dump_requests_before_crash()
        _end_all()


def end_if_a_child_fails() -> None:
    """In place of SGLang's handler of SIGQUIT while it launches, which kills this process and leaves its folder.

    In another thread, as in a Ray actor, there can be no handler: SIGQUIT kills the process.  It must not be ignored,
    as it is where a shell has started the job in the background (``command &`` in a script): the failure of a rank
    would have no effect, and the job would wait for ever.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, lambda number, frame: _end_all())
    elif signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        # By C's function: Python's may be called in the main thread only.
        function = ctypes.CDLL(None).signal
        function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        function(signal.SIGQUIT, signal.SIG_DFL)


def _end_all() -> None:
    logger.error("a process of the engine failed: all end")
    processes.end_children(seconds=2)
    folder.remove()
    os._exit(1)


def handlers() -> Handlers:
    """Who handles the signals now."""
    return {number: signal.getsignal(number) for number in processes.ENDING}


class Ending:
    """Stands before the handlers that were there: aborts all requests, then lets them go on.

    Args:
        before: :func:`handlers`, before SGLang set its own.
    """

    def __init__(self, manager: AdaptiveTokenizerManager, before: Handlers) -> None:
        self._manager = manager
        self._before = before
        self._begun = False
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                handled = callable(handler) and handler is not signal.default_int_handler
                self._place(number, self._soon if handled else handler)
            self._place(signal.SIGQUIT, EndingHandler(manager).running_phase_sigquit_handler)

    def _place(self, number: int, handler: Any) -> None:
        self._manager.event_loop.remove_signal_handler(number)  # SGLang's
        signal.signal(number, handler)

    def _soon(self, number: int, frame: Any) -> None:
        self._manager.event_loop.call_soon_threadsafe(self.begin, number)

    def begin(self, number: int) -> None:
        """Once; a second signal while the first is at work has no effect."""
        if self._begun:
            return
        self._begun = True
        task = self._manager.event_loop.create_task(self._end(number))
        self._manager.asyncio_tasks.add(task)

    async def _end(self, number: int) -> None:
        manager, handler = self._manager, self._before[number]
        logger.info("%s: ending, %d requests are aborted", signal.Signals(number).name, len(manager.rid_to_state))
        manager.gracefully_exit = True  # /health says so
        begun = time.monotonic()
        while manager.rid_to_state and time.monotonic() - begun < ABORT_SECONDS:
            # Again and again: a round starts others until its client is gone.
            manager.abort_request(abort_all=True)
            await asyncio.sleep(0.2)
        handler(number, None)
        await asyncio.sleep(ANSWER_SECONDS)
        force(handler)


def force(handler: Callable) -> None:
    """If ``handler`` is uvicorn's, it waits for open connections no longer."""
    server = getattr(handler, "__self__", None)
    if hasattr(server, "force_exit"):
        server.force_exit = True
