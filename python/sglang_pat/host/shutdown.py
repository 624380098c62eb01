"""The end of an engine on a signal.

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
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from sglang.srt.managers.tokenizer_manager import SignalHandler
from sglang.srt.utils.watchdog import SubprocessWatchdog

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.launch import processes
from sglang_pat.launch.processes import NAMED

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

ABORT_SECONDS = 3
"""Longest time for requests to be aborted: a switch may be under way."""
ANSWER_SECONDS = 3
"""Longest time for clients to read the end of their answers; SGLang looks after a stream for two seconds more."""
LAST_WORDS_SECONDS = 1
"""Time for processes to say why they end, and for Ray to pass it on, before they are killed."""


class ShutdownSignalHandler(SignalHandler):
    """SGLang's handler, but the end after a child's failure leaves nothing behind; SIGTERM is :class:`Shutdown`'s."""

    def running_phase_sigquit_handler(self, signum=None, frame=None) -> None:
        _ignore_sigquit()
        manager = self.tokenizer_manager
        if manager._subprocess_watchdog is not None:
            # Not its stop(): that takes a lock, which this very thread may hold where the signal found it.
            manager._subprocess_watchdog.over = True
        try:
            adapter.tokenizer.dump_requests(manager)
        finally:
            _end_all()


def end_if_a_child_fails() -> None:
    """Replace SGLang's handler of SIGQUIT while it launches, which kills this process and leaves its folder.

    In another thread than the main one, as in a Ray actor, there can be no handler.  The signal is ignored there,
    since its default would end this process before anyone has read what the failed child said, and
    :class:`ChildrenWatchdog` ends the engine.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, lambda number, frame: _end_all())
    elif signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        # By C's function: Python's may be called in the main thread only.
        function = ctypes.CDLL(None).signal
        function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        function(signal.SIGQUIT, signal.SIG_IGN)


class ChildrenWatchdog(SubprocessWatchdog):
    """Ends the engine once a child has ended, with a line that names it; SGLang's knows only its own processes' names.

    The other children first have :data:`LAST_WORDS_SECONDS`: in a switch they say whom they waited for.
    """

    over = False
    """Whether all processes are ending already."""

    def start(self) -> None:
        handled = threading.current_thread() is threading.main_thread()  # by a handler of a user, or of ours
        self._end = partial(os.kill, os.getpid(), signal.SIGQUIT) if handled else _end_all
        super().start()

    def _check_processes(self) -> bool:
        ended = [process for process in self._processes if not process.is_alive()]
        if not ended or self._stop_event.wait(LAST_WORDS_SECONDS) or self.over:
            return False
        for process in ended:
            logger.error("%s has ended (pid %d, exit code %s)", process.name, process.pid, process.exitcode)
        self._end()
        return True


def make_watchdog(processes: list[Any], process_names: list[str] | None = None) -> SubprocessWatchdog:
    """Make the watchdog of a launch: ours if there is one of our processes, else SGLang's."""
    ours = any(process.name.startswith(NAMED) for process in processes)
    return (ChildrenWatchdog if ours else SubprocessWatchdog)(processes, process_names)


def _ignore_sigquit() -> None:
    """Ignore SIGQUIT, which each failed rank and the watchdog send: the handler is not to be called within itself."""
    with suppress(ValueError):  # in another thread than the main one, where there is no handler
        signal.signal(signal.SIGQUIT, lambda number, frame: None)


def _end_all() -> NoReturn:
    _ignore_sigquit()
    with suppress(Exception):  # the signal may have come while this thread was writing a line
        logger.error("a process of the engine failed: all end")
    try:
        processes.end_children(seconds=2)
        processes.remove_private_folder()
    finally:
        os._exit(1)


def get_handlers() -> dict[int, Any]:
    """The handlers of the signals now, by number, as ``signal.getsignal`` returns them."""
    return {number: signal.getsignal(number) for number in processes.ENDING}


class Shutdown:
    """Stands before the handlers that were there: aborts all requests, then lets them go on.

    Args:
        before: what :func:`get_handlers` gave before SGLang set its own.
    """

    def __init__(self, manager: TokenizerManager, before: dict[int, Any]) -> None:
        self._manager = manager
        self._before = before
        self._begun = False
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                handled = callable(handler) and handler is not signal.default_int_handler
                self._set_handler(number, self._handle_soon if handled else handler)
            self._set_handler(signal.SIGQUIT, ShutdownSignalHandler(manager).running_phase_sigquit_handler)

    def _set_handler(self, number: int, handler: Any) -> None:
        self._manager.event_loop.remove_signal_handler(number)  # SGLang's
        signal.signal(number, handler)

    def _handle_soon(self, number: int, frame: Any) -> None:
        self._manager.event_loop.call_soon_threadsafe(self.begin, number)

    def begin(self, number: int) -> None:
        """Begin the end; a second signal while the first is at work has no effect."""
        if self._begun:
            return
        self._begun = True
        task = self._manager.event_loop.create_task(self._end(number))
        self._manager.asyncio_tasks.add(task)

    async def _end(self, number: int) -> None:
        manager, handler = self._manager, self._before[number]
        logger.info("%s: ending, %d requests are aborted", signal.Signals(number).name, len(manager.rid_to_state))
        assign(manager, gracefully_exit=True)  # /health says so
        begun = time.monotonic()
        while manager.rid_to_state and time.monotonic() - begun < ABORT_SECONDS:
            # Again and again: a round starts others until its client is gone.
            manager.abort_request(abort_all=True)
            await asyncio.sleep(0.2)
        handler(number, None)
        await asyncio.sleep(ANSWER_SECONDS)
        server = getattr(handler, "__self__", None)
        if hasattr(server, "force_exit"):  # uvicorn's: it waits for open connections no longer
            server.force_exit = True
