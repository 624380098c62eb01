"""Servers as forks of one interpreter that has imported SGLang: a start takes 1 s of CPU time instead of 15, a start of
stock SGLang 2 instead of 35.

    with Prefork() as prefork:
        server = Server(model, "--tp", "1", prefork=prefork)

For many servers in one test run, on machines without CUDA: importing SGLang there touches the driver, which does not
survive a fork.  What a module reads of the environment while it is imported is that of the first one.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import queue
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULE = "sglang_pat.launch_server"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of every server: one thread a rank, and nothing to be downloaded."""

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a new process: a test run that is killed leaves no server behind (its ranks follow it)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Prefork:
    """The side of who wants servers.  The interpreter starts with the first of them and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._began: queue.SimpleQueue[Fork | None]

    def start(self, argv: Sequence[str], log: Path, env: dict[str, str]) -> Fork:
        """``python -m sglang_pat.launch_server argv``, with this environment; it leads a process group.

        Raises:
            RuntimeError: the interpreter has ended.
        """
        if self._process is None:
            self._began = queue.SimpleQueue()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_pat.testing.prefork"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, process_group=0, env=os.environ | ENVIRONMENT,
            )  # fmt: skip
            threading.Thread(
                target=self._read, args=(self._process, self._began), name="prefork", daemon=True
            ).start()
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"argv": list(argv), "log": str(log), "env": env}) + "\n")
            self._process.stdin.flush()
        if (fork := self._began.get()) is None:
            process, self._process = self._process, None
            raise RuntimeError(f"the interpreter that forks servers has ended: exit code {process.wait()}")
        return fork

    @staticmethod
    def _read(process: subprocess.Popen, began: queue.SimpleQueue[Fork | None]) -> None:
        forks: dict[int, Fork] = {}
        for line in process.stdout:
            event = json.loads(line)
            if "began" in event:
                fork = forks[event["began"]] = Fork(event["began"])
                began.put(fork)
            else:
                forks.pop(event["ended"]).end(event["code"])
        for fork in forks.values():  # they die with the interpreter
            fork.end(-signal.SIGKILL)
        began.put(None)

    def stop(self) -> None:
        """End the interpreter and the servers that it has forked."""
        process, self._process = self._process, None
        if process is not None:
            process.stdin.close()
            process.wait()

    def __enter__(self) -> Prefork:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class Fork:
    """What ``subprocess.Popen`` has of a process, as far as tests use it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(MODULE, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -- the interpreter -------------------------------------------------------------------------------------------------


def serve() -> None:
    """Fork a server for each line of the input until it ends; in the fork, be that server."""
    import setproctitle

    setproctitle.getproctitle()  # see host/preload.py
    orders, events = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what is imported may print
    _import_all()
    ended: dict[int, int] = {}  # descriptors of processes, with their ids
    waiting, buffer = select.poll(), b""
    waiting.register(orders, select.POLLIN)
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor == orders:
                read = os.read(orders, 1 << 20)
                if not read:
                    os._exit(0)  # what was imported has nothing to put away, and takes seconds to
                *lines, buffer = (buffer + read).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    if (pid := os.fork()) == 0:
                        for other in (orders, events, *ended):
                            os.close(other)
                        return become(**order)
                    child = os.pidfd_open(pid)
                    ended[child] = pid
                    waiting.register(child, select.POLLIN)
                    _say(events, {"began": pid})
            else:
                waiting.unregister(descriptor)
                os.close(descriptor)
                pid, status = os.waitpid(ended.pop(descriptor), 0)
                _say(events, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _import_all() -> None:
    """What a server imports, and its ranks."""
    from sglang_pat.host import cpu_shim, noise, processes

    cpu_shim.install()
    warm, processes.warm = processes.warm, lambda: None  # each server forks its own fork server
    with noise.quiet_imports():
        import sglang_pat.host.http
        import sglang_pat.host.preload  # noqa: F401
    processes.warm = warm


def _say(events: int, event: dict[str, int]) -> None:
    os.write(events, json.dumps(event).encode() + b"\n")


def become(argv: list[str], log: str, env: dict[str, str]) -> None:
    """Run the server in this process, as if it had just been started."""
    import setproctitle

    die_with_parent()
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, target)
        os.close(source) if source != output else None
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.path[:0] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    setproctitle.setproctitle(" ".join([sys.executable, "-m", MODULE, *argv]))
    sys.argv = [MODULE, *argv]
    if "--adaptive-tp" not in argv:
        fork_stock()
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def fork_stock() -> None:
    """Have stock SGLang fork its processes from this one; spawned ones would import everything anew."""
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None


if __name__ == "__main__":
    serve()
