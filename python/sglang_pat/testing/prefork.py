"""Programs that start engines, as forks of one interpreter that has imported SGLang: a start takes 1 s of CPU time
instead of 15, a start of stock SGLang 2 instead of 35.

    with Prefork() as prefork:
        server = Server(model, "--tp", "1", prefork=prefork)
        program = prefork.popen("profiler.sweep", ["--model-path", "M"], os.environ, stdout=log)

For many engines in one test run, on machines without CUDA: importing SGLang there touches the driver, which does not
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
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any

SERVER = "sglang_pat.launch_server"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of every server: one thread a rank, and nothing to be downloaded."""
MOST = 1 << 20
"""Bytes of an order or an event."""

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a new process: a test run that is killed leaves no server behind (its ranks follow it)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def popen(
    prefork: Prefork | None,
    module: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int | IO | None = None,
    stdout: int | IO | None = None,
    stderr: int | IO | None = None,
) -> subprocess.Popen | Fork:
    """``python -m module argv`` by ``prefork``, or without one in a new interpreter (:meth:`Prefork.popen`)."""
    if prefork is not None:
        return prefork.popen(module, argv, env, stdin=stdin, stdout=stdout, stderr=stderr)
    return subprocess.Popen(
        [sys.executable, "-m", module, *argv], text=True, process_group=0, preexec_fn=die_with_parent, env=env,
        stdin=stdin, stdout=stdout, stderr=stderr,
    )  # fmt: skip


def run(
    prefork: Prefork | None, module: str, argv: Sequence[str], env: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """As :func:`popen`, until it ends; stdout and stderr as texts.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was killed.
    """
    process = popen(prefork, module, argv, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said, complained = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return subprocess.CompletedProcess([module, *argv], process.wait(), said, complained)


class Prefork:
    """The side of who wants programs.  The interpreter starts with the first of them and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket
        self._began: queue.SimpleQueue[Fork | None]

    def popen(
        self,
        module: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int | IO | None = None,
        stdout: int | IO | None = None,
        stderr: int | IO | None = None,
    ) -> Fork:
        """``python -m module argv``, with this environment; it leads a process group.

        Args:
            stdin, stdout, stderr: as of ``subprocess.Popen``, in text; ``None``: nothing.

        Raises:
            RuntimeError: the interpreter has ended.
        """
        if self._process is None:
            self._start()
        with ExitStack() as ours:
            nothing = ours.enter_context(open(os.devnull, "r+b"))
            theirs: list[IO | int] = [nothing] * 3
            ends: list[IO | None] = [None] * 3
            for number, wanted in enumerate((stdin, stdout, stderr)):
                if wanted == subprocess.PIPE:
                    pair = [os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)]
                    there, here = pair if number == 0 else reversed(pair)
                    theirs[number], ends[number] = ours.enter_context(there), here
                elif wanted == subprocess.STDOUT:
                    theirs[number] = theirs[1]
                elif wanted is not None and wanted != subprocess.DEVNULL:
                    theirs[number] = wanted
            order = json.dumps({"module": module, "argv": list(argv), "env": dict(env)}).encode()
            files = [file if isinstance(file, int) else file.fileno() for file in theirs]
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._channel, [order], files)
            fork = self._began.get()
        if fork is None:
            code = self._process.wait() if self._process else "unknown"
            self._process = None
            raise RuntimeError(f"the interpreter that forks programs has ended: exit code {code}")
        fork.args, (fork.stdin, fork.stdout, fork.stderr) = [module, *argv], ends
        return fork

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_pat.testing.prefork", str(theirs.fileno())], stdin=subprocess.DEVNULL,
                process_group=0, env=os.environ | ENVIRONMENT, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._began = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._channel, self._began), name="prefork", daemon=True).start()

    @staticmethod
    def _read(channel: socket.socket, began: queue.SimpleQueue[Fork | None]) -> None:
        forks: dict[int, Fork] = {}
        with suppress(ConnectionResetError):
            while line := channel.recv(MOST):
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
        """End the interpreter and the programs that it has forked."""
        process, self._process = self._process, None
        if process is not None:
            self._channel.shutdown(socket.SHUT_WR)
            process.wait()

    def __enter__(self) -> Prefork:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


class Fork:
    """What ``subprocess.Popen`` has of a process, as far as it is used."""

    stdin: IO | None = None
    stdout: IO | None = None
    stderr: IO | None = None
    args: Sequence[str] = ()

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
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """What it wrote to the pipes stdout and stderr, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``timeout`` seconds; it runs on.
        """
        said: dict[str, str] = {}

        def read(name: str, file: IO) -> None:
            with file:
                said[name] = file.read()

        files = {name: file for name in ("stdout", "stderr") if (file := getattr(self, name)) is not None}
        readers = [threading.Thread(target=read, args=item, daemon=True) for item in files.items()]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said.get("stdout"), said.get("stderr")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -- the interpreter -------------------------------------------------------------------------------------------------


def serve(number: int) -> None:
    """Fork a program for each order until there are no more; in the fork, be that program.

    ``number``: of the descriptor of the channel.
    """
    import setproctitle

    setproctitle.getproctitle()  # see launch/preload.py
    channel = socket.socket(fileno=number)
    os.set_inheritable(number, False)
    os.dup2(2, 1)  # what is imported may print
    _import_all()
    ended: dict[int, int] = {}  # descriptors of processes, with their ids
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor == number:
                order, files, *_ = socket.recv_fds(channel, MOST, 3)
                if not order:
                    os._exit(0)  # what was imported has nothing to put away, and takes seconds to
                if (pid := os.fork()) == 0:
                    channel.close()
                    for other in ended:
                        os.close(other)
                    return become(files, **json.loads(order))
                for file in files:
                    os.close(file)
                child = os.pidfd_open(pid)
                ended[child] = pid
                waiting.register(child, select.POLLIN)
                _say(channel, {"began": pid})
            else:
                waiting.unregister(descriptor)
                os.close(descriptor)
                pid, status = os.waitpid(ended.pop(descriptor), 0)
                _say(channel, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _import_all() -> None:
    """What a server imports, and its ranks."""
    from sglang_pat.cpu import shim
    from sglang_pat.launch import processes

    shim.ensure()
    warm, processes.warm = processes.warm, lambda: None  # each program forks its own fork server
    import sglang_pat.launch.preload  # noqa: F401

    processes.warm = warm


def _say(channel: socket.socket, event: dict[str, int]) -> None:
    channel.send(json.dumps(event).encode())


def become(files: list[int], module: str, argv: list[str], env: dict[str, str]) -> None:
    """Run the program in this process, as if it had just been started; ``files``: its stdin, stdout, stderr."""
    import setproctitle

    die_with_parent()
    os.setpgid(0, 0)
    for target, source in enumerate(files):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.path[:0] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    setproctitle.setproctitle(" ".join([sys.executable, "-m", module, *argv]))
    sys.argv = [module, *argv]
    if module == SERVER and "--adaptive-tp" not in argv:
        fork_stock()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_stock() -> None:
    """Have stock SGLang fork its processes from this one; spawned ones would import everything anew."""
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None


if __name__ == "__main__":
    serve(int(sys.argv[1]))
