"""How the engine's processes are started.

SGLang spawns: every process imports it anew, 7 s of CPU time each.  On a machine without CUDA a
fork server imports it once, while the main process is still importing, and the ranks, the
coordinator and the detokenizer are forked from it.  With CUDA we spawn as the host does: importing
SGLang touches the driver, which does not survive a fork.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from typing import Any

from sglang_pat.host import cpu_shim

PRELOAD = ["sglang_pat.host.preload"]


def context() -> BaseContext:
    """The multiprocessing context of the engine's processes."""
    return mp.get_context("forkserver" if cpu_shim.needed() else "spawn")


def warm() -> None:
    """Start the fork server, so that it imports while this process does.  Call early; no-op with CUDA."""
    if cpu_shim.needed():
        context().set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def start(target: Callable, *args: Any) -> tuple[mp.Process, Any]:
    """Start ``target(*args, parent_pid, writer)``; returns the process and the reading end of its pipe."""
    reader, writer = context().Pipe(duplex=False)
    process = context().Process(target=_run, args=(dict(os.environ), target, *args, os.getpid(), writer))
    process.start()
    # Without this copy the reader sees the end of the pipe when the child dies.
    writer.close()
    return process, reader


def _run(environment: dict[str, str], target: Callable, *args: Any) -> None:
    # The fork server has the environment of the moment it was started; SGLang sets variables after that.
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def end_engine(parent_pid: int) -> None:
    """End the whole engine from a child that cannot go on: the host's SIGQUIT to the main process."""
    try:
        os.kill(parent_pid, signal.SIGQUIT)
    finally:
        # Threads of a failed collective may not let the interpreter exit.
        os._exit(1)
