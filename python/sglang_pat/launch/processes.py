"""The start and the end of the engine's processes.

SGLang spawns: every process imports it anew, 10 s of CPU time each.  On a machine without CUDA the
ranks, the coordinator and the detokenizer are forked from a fork server, which has imported it.  The
server's main process imports first and forks the fork server, so that this is done once
(:func:`fork_here`); inside a user's Python process the fork server is a new interpreter and imports while
that process does (:func:`warm_up_fork_server`).  With CUDA we spawn as SGLang does: importing SGLang touches the
driver, which does not survive a fork.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from multiprocessing import connection, forkserver, util
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NoReturn

import psutil
import setproctitle

from sglang_pat.config import VARIABLE
from sglang_pat.cpu import shim

logger = logging.getLogger(__name__)

PRELOAD = ["sglang_pat.preload"]
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end the engine: the main process acts on them, its children ignore them."""
END_SECONDS = 30
"""Seconds for which killed processes are waited for: the driver takes back a GPU's memory meanwhile."""
POLL_SECONDS = 0.01
NAMED = "sglang_pat: "
"""Prefix of the processes' names in this process: the lines that say how they ended have it."""
RANK_TITLE = "sglang_pat::rank"
"""Title of a rank's process, before its number."""


FOLDER_PREFIX = "sglang_pat_"
LONGEST_PLACE = 50
"""Most characters of the temporary folder's path: a socket's path has 107 at most."""
_engines = count()


@cache
def get_private_folder() -> Path:
    """This process's folder: its sockets lie in it, and no other user can reach them.  Made on first use, removed at
    the end of the process, in order or by :func:`remove_private_folder`.

    Raises:
        ValueError: there is no place for it, one line.
    """
    try:
        place = tempfile.gettempdir()
        place = place if len(place) <= LONGEST_PLACE else "/tmp"
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
    except OSError as error:
        advice = "set TMPDIR to a folder that can be written"
        raise ValueError(f"no temporary folder for sockets ({error.strerror}): {advice}") from None
    # In this process only, and after ``multiprocessing`` has removed its own folder (priority -100), which lies in it.
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)
    return folder


def make_engine_folder() -> Path:
    """Make a folder for one engine's sockets in this process's folder."""
    folder = get_private_folder() / str(next(_engines))
    folder.mkdir()
    return folder


def remove_private_folder() -> None:
    """Remove this process's folder now: the process will not end in order."""
    if get_private_folder.cache_info().currsize:
        shutil.rmtree(get_private_folder(), ignore_errors=True)
        get_private_folder.cache_clear()


def get_context() -> BaseContext:
    """The multiprocessing context of the engine's processes."""
    return mp.get_context("forkserver" if shim.is_needed() else "spawn")


def warm_up_fork_server() -> None:
    """Start the fork server, so that it imports while this process does.  Call early; no-op with CUDA.

    Raises:
        ValueError: there is no folder for its socket; one line.
    """
    # A child of ``multiprocessing`` that reads the program's main module, which imports ``Engine``, needs none.
    if not shim.is_needed() or getattr(mp.current_process(), "_inheriting", False):
        return
    get_context().set_forkserver_preload(PRELOAD)
    with _put_sockets_in_private_folder(), _ignore_signals_in_children():
        forkserver.ensure_running()


def fork_here() -> None:
    """Import for the fork server in this process and fork it; no-op with CUDA.

    For a main program of ours only: what else a process holds, threads above all, does not survive a fork.

    Raises:
        ValueError: there is no folder for its socket; one line.
    """
    if not shim.is_needed():
        return
    get_private_folder()
    for name in PRELOAD:
        importlib.import_module(name)
    spawn, util.spawnv_passfds = util.spawnv_passfds, _patch_process_to_fork
    try:
        warm_up_fork_server()
    finally:
        util.spawnv_passfds = spawn


def _patch_process_to_fork(_path: bytes, command: list[str], keep: list[int]) -> int:
    """Run in a fork of this process what ``multiprocessing`` would run in a new interpreter (the command's last word);
    returns its pid.

    As there, only the descriptors ``keep`` stay open.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        first = 3
        for number in [*sorted(keep), os.sysconf("SC_OPEN_MAX")]:
            os.closerange(first, number)
            first = number + 1
        # Held by the thread that forks us.
        forkserver._forkserver._lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
        # Whoever ends the engine spares resource trackers: they remove what the dead left in shared memory.
        name = "resource_tracker" if "resource_tracker" in command[-1] else "fork_server"
        setproctitle.setproctitle(f"sglang_pat::{name}")
        exec(command[-1], {})
        code = 0
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


@contextmanager
def _put_sockets_in_private_folder() -> Iterator[None]:
    """Have ``multiprocessing`` put its sockets into our folder: it chooses one on first use, and keeps it."""
    place, tempfile.tempdir = tempfile.tempdir, str(get_private_folder())
    try:
        util.get_temp_dir()
        yield
    finally:
        tempfile.tempdir = place


@contextmanager
def _ignore_signals_in_children() -> Iterator[None]:
    """Have processes that are started inside the block ignore what ends the engine from the first moment, the fork
    server too: a terminal and a service manager send it to all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(name: str, target: Callable, *args: Any) -> tuple[mp.Process, Any]:
    """Start ``target(*args, parent_pid, writer)``; returns the process and the reading end of its pipe."""
    warm_up_fork_server()
    reader, writer = get_context().Pipe(duplex=False)
    # The children's own SGLang is not to be made adaptive: they are.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    process: mp.Process = get_context().Process(  # pyright: ignore[reportAttributeAccessIssue]
        name=NAMED + name, target=_run, args=(environment, target, *args, os.getpid(), writer)
    )
    with _ignore_signals_in_children():
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
    _avoid_semaphores()
    target(*args)


def _die_with_parent() -> None:
    """End with the main process.  SGLang asks the kernel to end a process with its parent, but here that is the fork
    server, which lives as long as one of its children."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _avoid_semaphores() -> None:
    """Give tqdm a lock of threads: its own takes a semaphore with a name, which a killed process leaves behind."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


class NotStarted(ValueError):
    """The error of a process that could not start; one line with why."""


def wait_until_ready(started: Mapping[str, tuple[mp.Process, connection.Connection]]) -> list[dict[str, Any]]:
    """Reports of the processes ``started`` (name -> what :func:`start` returned), as each is ready.

    Raises:
        NotStarted: one of them cannot start; all children have ended.
    """
    names = {reader: name for name, (_, reader) in started.items()}
    reports: dict[str, dict[str, Any]] = {}
    while len(reports) < len(started):
        waited_for = [reader for reader, name in names.items() if name not in reports]
        ready = connection.wait(waited_for)
        now = {names[reader]: _report(reader) for reader in waited_for if reader in ready}
        if failed := [name for name, report in now.items() if report["status"] != "ready"]:
            # The others may have failed only because it has.
            first = min(failed, key=lambda name: now[name]["at"])
            why = now[first]["why"] or _describe_death(first, started[first][0])
            end_children()
            raise NotStarted(why)
        reports |= now
    return [reports[name] for name in started]


def _report(reader: connection.Connection) -> dict[str, Any]:
    try:
        return reader.recv()
    except EOFError:
        return {"status": "dead", "why": "", "at": 0.0}


def _describe_death(name: str, process: mp.Process) -> str:
    process.join(END_SECONDS)
    if process.exitcode == -signal.SIGKILL:
        return f"{name} was killed while it started: the kernel does that when memory runs out, see its log (dmesg)"
    return f"{name} ended while it started, with exit code {process.exitcode}"


def end_engine(parent_pid: int, writer: connection.Connection, why: str) -> NoReturn:
    """End the whole engine from a child that cannot go on.

    Before it is ready the main process waits for its report (:func:`wait_until_ready`).  Later, once it has closed
    ``writer``, SGLang's SIGQUIT tells the main process.

    Args:
        why: the reason, one line.
    """
    try:
        if writer.closed:
            os.kill(parent_pid, signal.SIGQUIT)
        else:
            writer.send({"status": "refused", "why": why, "at": time.monotonic()})
    finally:
        # Threads of a failed collective may not let the interpreter exit.
        os._exit(1)


def exit_on_signals() -> None:
    """Have SIGTERM and SIGINT leave the main program by way of its ``finally`` blocks, with exit code 128 + n."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in ENDING:
        signal.signal(number, leave)


def is_resource_tracker(process: psutil.Process) -> bool:
    """Whether a process is one of Python's resource trackers, which remove what dead processes left in shared memory,
    and end by themselves."""
    with suppress(psutil.NoSuchProcess):
        return any("resource_tracker" in word for word in process.cmdline())
    return False


def wait_until_ended(waited_for: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all processes have ended; returns those that have not after ``seconds``."""
    left, begun = list(waited_for), time.monotonic()
    while (left := [process for process in left if not _has_ended(process)]) and time.monotonic() - begun < seconds:
        time.sleep(POLL_SECONDS)
    return left


def _has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended.  A zombie has, once its last thread has ended: its memory is free.

    It stays a zombie until somebody takes its exit code.  For an orphan that is process 1, which in a container may
    do so late or never.
    """
    if not process.is_running():
        return True
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
    return True


def end_children(seconds: float = END_SECONDS) -> None:
    """Kill all processes below this one and wait until they have ended; a warning names those that have not.

    Python's resource trackers are spared (:func:`is_resource_tracker`).
    """
    children = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if is_resource_tracker(child):
                continue
            child.kill()
            children.append(child)
    if left := wait_until_ended(children, seconds):
        numbers = ", ".join(str(child.pid) for child in left)
        logger.warning("processes killed %g s ago have not ended: %s; their memory is still taken", seconds, numbers)
