"""Programs that start engines, as forks of one interpreter that has imported SGLang: a start takes 1 s of CPU time
instead of 15, a start of stock SGLang 2 instead of 35.

    with Prefork() as prefork:
        server = Server(model, "--tp", "1", prefork=prefork)
        program = prefork.popen("profiler.sweep", ["--model-path", "M"], os.environ, stdout=log)

For many engines in one test run, on machines without CUDA: importing SGLang there touches the driver, which does not
survive a fork.  What a module reads of the environment while it is imported is that of the first one.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import multiprocessing
import os
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
from typing import IO, Any, NoReturn
from unittest import mock

SERVER = "sglang_pat.launch_server"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every server: one thread a rank, and no downloads."""
MOST = 1 << 20
"""Most bytes of an order."""

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have this new process die with its parent: a killed test run leaves no server behind, nor a server its ranks."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def popen(
    prefork: Prefork | None, module: str, argv: Sequence[str], env: Mapping[str, str], **files: Any
) -> subprocess.Popen | Fork:
    """``python -m module argv`` by ``prefork``, or without one in a new interpreter (:meth:`Prefork.popen`)."""
    if prefork is not None:
        return prefork.popen(module, argv, env, **files)
    return subprocess.Popen(
        [sys.executable, "-m", module, *argv], text=True, process_group=0, preexec_fn=die_with_parent, env=env, **files
    )


def run(
    prefork: Prefork | None, module: str, argv: Sequence[str], env: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a program like :func:`popen`, and wait for its end; stdout and stderr are texts.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``, and was killed.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as complained:
        process = popen(prefork, module, argv, env, stdout=output, stderr=complained)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        output.seek(0)
        complained.seek(0)
        return subprocess.CompletedProcess([module, *argv], code, output.read(), complained.read())


class Prefork:
    """Client of an interpreter that forks programs.  It starts with the first of them, and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket

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
            stdin, stdout, stderr: as for ``subprocess.Popen``, in text; ``None``: nothing.

        Raises:
            RuntimeError: the interpreter has ended.
        """
        if self._process is None:
            self._start()
        with ExitStack() as theirs:
            nothing = theirs.enter_context(open(os.devnull, "r+b"))
            files: list[IO | int] = [nothing] * 3
            ends: list[IO | None] = [None] * 3
            for number, stream in enumerate((stdin, stdout, stderr)):
                if stream == subprocess.PIPE:
                    pair = [os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)]
                    far_end, ends[number] = pair if number == 0 else reversed(pair)
                    files[number] = theirs.enter_context(far_end)
                elif stream == subprocess.STDOUT:
                    files[number] = files[1]
                elif stream is not None and stream != subprocess.DEVNULL:
                    files[number] = stream
            status, writer = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True))
            files.append(theirs.enter_context(writer))
            order = json.dumps({"module": module, "argv": list(argv), "env": dict(env)}).encode()
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._channel, [order], [f if isinstance(f, int) else f.fileno() for f in files])
        if not (pid := status.readline()):
            code = self._process.wait() if self._process else "unknown"
            self._process = None
            raise RuntimeError(f"the interpreter that forks programs has ended: exit code {code}")
        return Fork([module, *argv], int(pid), status, *ends)

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_pat.testing.prefork", str(theirs.fileno())], stdin=subprocess.DEVNULL,
                process_group=0, env=os.environ | ENVIRONMENT, pass_fds=[theirs.fileno()],
            )  # fmt: skip

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
    """A process with the part of ``subprocess.Popen`` that is used.

    Args:
        status: gives the exit code, or its own end, once the process has ended.
    """

    def __init__(
        self, args: Sequence[str], pid: int, status: IO, stdin: IO | None, stdout: IO | None, stderr: IO | None
    ) -> None:
        self.args, self.pid, self._status = args, pid, status
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._status, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.read() or -signal.SIGKILL)  # it dies with the interpreter
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# -- the interpreter -------------------------------------------------------------------------------------------------


def serve(number: int) -> None:
    """Fork a program for each order until there are no more; in the fork, be that program.

    Args:
        number: descriptor of the channel.
    """
    import setproctitle

    setproctitle.getproctitle()  # see preload.py
    channel = socket.socket(fileno=number)
    os.set_inheritable(number, False)
    os.dup2(2, 1)  # what is imported may print
    _import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody takes the exit code of a program's parent
    while True:
        order, files, *_ = socket.recv_fds(channel, MOST, 4)
        if not order:
            os._exit(0)  # what was imported has nothing to put away, and takes seconds to
        if os.fork() == 0:
            channel.close()
            return attend(*files, **json.loads(order))
        for file in files:
            os.close(file)


def attend(stdin: int, stdout: int, stderr: int, status: int, **program: Any) -> None:
    """Be the parent of a program, in a fork, and say its id and then its exit code."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        os.close(status)
        return become([stdin, stdout, stderr], **program)
    for file in (stdin, stdout, stderr):
        os.close(file)
    with suppress(BrokenPipeError):
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _import_all() -> None:
    from sglang_pat.cpu import shim
    from sglang_pat.launch import processes

    shim.ensure()
    with mock.patch.object(processes, "warm_up_fork_server", lambda: None):  # each program forks its own fork server
        logging.disable(logging.WARNING)  # models of SGLang that this machine cannot load, a line each
        import sglang_pat.preload  # noqa: F401
    logging.disable(logging.NOTSET)


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
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    _exit(code)


def _exit(code: object) -> NoReturn:
    """End like ``sys.exit(code)``, which would take seconds to put away what was imported."""
    vars(threading)["_shutdown"]()  # as multiprocessing ends a process
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def fork_stock() -> None:
    """Have stock SGLang fork its processes from this one; spawned ones would import everything anew.  So would the fork
    server of an engine that the variable makes adaptive."""
    from sglang_pat.config import VARIABLE
    from sglang_pat.launch import processes

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    if VARIABLE in os.environ:
        processes.fork_here()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
