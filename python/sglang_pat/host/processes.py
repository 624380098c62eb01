"""How the engine's processes are started, and ended.

SGLang spawns: every process imports it anew, 7 s of CPU time each.  On a machine without CUDA a
fork server imports it once, while the main process is still importing, and the ranks, the
coordinator and the detokenizer are forked from it.  With CUDA we spawn as the host does: importing
SGLang touches the driver, which does not survive a fork.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from multiprocessing.context import BaseContext
from typing import Any

import psutil

from sglang_pat.host import cpu_shim, noise
from sglang_pat.host.folder import private_folder

PRELOAD = ["sglang_pat.host.preload"]
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end the engine: the main process acts on them, its children ignore them."""
END_SECONDS = 30
"""Longest that killed processes are waited for: the driver takes back a GPU's memory meanwhile."""


def context() -> BaseContext:
    """The multiprocessing context of the engine's processes."""
    return mp.get_context("forkserver" if cpu_shim.needed() else "spawn")


def warm() -> None:
    """Start the fork server, so that it imports while this process does.  Call early; no-op with CUDA.

    Raises:
        ValueError: there is no folder for its socket; one line.
    """
    if not cpu_shim.needed():
        return
    context().set_forkserver_preload(PRELOAD)
    with _sockets_in_the_private_folder(), _deaf_children(), noise.quiet_children():
        forkserver.ensure_running()


@contextmanager
def _sockets_in_the_private_folder() -> Iterator[None]:
    """``multiprocessing`` puts its sockets into a folder that it makes on first use."""
    place, tempfile.tempdir = tempfile.tempdir, str(private_folder())
    try:
        util.get_temp_dir()
        yield
    finally:
        tempfile.tempdir = place


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started meanwhile ignore what ends the engine from the first moment, the fork server too: a terminal
    and a service manager send it to all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(target: Callable, *args: Any) -> tuple[mp.Process, Any]:
    """Start ``target(*args, parent_pid, writer)``; returns the process and the reading end of its pipe."""
    reader, writer = context().Pipe(duplex=False)
    process = context().Process(target=_run, args=(dict(os.environ), target, *args, os.getpid(), writer))
    with _deaf_children():
        process.start()
    # Without this copy the reader sees the end of the pipe when the child dies.
    writer.close()
    return process, reader


def _run(environment: dict[str, str], target: Callable, *args: Any) -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    # The fork server has the environment of the moment it was started; SGLang sets variables after that.
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_die_with_parent, name="die with parent", daemon=True).start()
    _no_semaphores()
    target(*args)


def _die_with_parent() -> None:
    """The host asks the kernel to end a process with its parent, but here that is the fork server, which lives as long
    as one of its children."""
    mp.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def _no_semaphores() -> None:
    """tqdm takes a semaphore with a name, which a killed process leaves behind; a lock of threads is enough here."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def end_engine(parent_pid: int) -> None:
    """End the whole engine from a child that cannot go on: the host's SIGQUIT to the main process."""
    try:
        os.kill(parent_pid, signal.SIGQUIT)
    finally:
        # Threads of a failed collective may not let the interpreter exit.
        os._exit(1)


def exit_on_signals() -> None:
    """Have SIGTERM and SIGINT leave the main program by way of its ``finally`` blocks, with exit code 128 + n."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in ENDING:
        signal.signal(number, leave)


def end_children(seconds: float = END_SECONDS) -> None:
    """Kill all processes below this one and wait until they are gone.

    Python's resource trackers end by themselves, after they have removed what the dead left in shared memory.
    """
    children = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("resource_tracker" in word for word in child.cmdline()):
                continue
            child.kill()
            children.append(child)
    psutil.wait_procs(children, timeout=seconds)
