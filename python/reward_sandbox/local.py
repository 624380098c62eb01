"""Programs in processes of this machine: in bubblewrap, or without protection."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_sandbox import program_runner, seccomp
from reward_sandbox.runs import Resources, Run, SandboxError

NOBODY = 65534
"""User and group of a program.  Without a user of its own, a limit on processes does not hold for root."""
START_SECONDS = 30.0
"""Longest start of a sandbox; it takes 0.03 s on a quiet machine."""
GRACE_SECONDS = 2.0
"""Time after the maximum of a run for the process inside to say what happened; then the sandbox is killed."""
KILL_SECONDS = 10.0
"""Longest end of a killed sandbox; it takes milliseconds, unless the machine has no core for it."""
STACK = 128 << 20
"""Bytes of stack: deep recursion is usual in answers to programming tasks."""
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts more threads than a program may have
}
"""Environment variables of a program; it has no others."""


class LocalSession:
    """The process in a sandbox that runs a program once for each message (``program_runner.py``)."""

    def __init__(self, command: list[str], program: str, resources: Resources, **how: Any) -> None:
        self.resources = resources
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, **how
            )
        except OSError as error:
            raise SandboxError(f"{command[0]}: {error.strerror}") from None
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        first = {"program": program, "rlimits": _make_rlimits(resources)}
        if self._ask(first, START_SECONDS) is None:
            raise SandboxError(f"{command[0]}: {self._find_reason()}")

    def _find_reason(self) -> str:
        """Close the sandbox, and return why it did not start."""
        errors = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stdin.close()
            self.process.wait(GRACE_SECONDS)
            os.set_blocking(self.stderr.fileno(), False)
            errors = (self.stderr.read(1 << 16) or b"").decode(errors="replace").strip()
        self.close()
        return errors.splitlines()[-1] if errors else f"no answer, ended with {self.process.returncode}"

    def run(self, stdin: str, limit: float, maximum: float) -> Run:
        """See :class:`reward_sandbox.runs.Session`."""
        start = time.monotonic()
        case = {"stdin": stdin, "limit": limit, "maximum": maximum, "output": self.resources.output}
        answer = self._ask(case, maximum + GRACE_SECONDS)
        wall = time.monotonic() - start
        if (run := _read_run(answer)) is not None:
            return run
        self._kill()  # else a late answer would be that of the next case
        return Run(ended="cut" if wall > maximum else "lost", wall=min(wall, maximum))

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer; None if there is none: it is late, or too long, or the process has ended."""
        deadline = time.monotonic() + seconds
        data = json.dumps(message).encode()
        try:
            self._write(struct.pack(">I", len(data)) + data, deadline)
            (size,) = struct.unpack(">I", self._read(4, deadline))
            if size > 6 * self.resources.output + 65536:  # JSON writes a byte as six at most
                return None
            answer = json.loads(self._read(size, deadline))
        except (OSError, EOFError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def _write(self, data: bytes, deadline: float) -> None:
        fd = self.stdin.fileno()
        os.set_blocking(fd, False)
        left = memoryview(data)
        while left:
            _wait_for(fd, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(fd, left) :]

    def _read(self, size: int, deadline: float) -> bytes:
        fd, data = self.stdout.fileno(), bytearray()
        while len(data) < size:
            _wait_for(fd, select.POLLIN, deadline)
            piece = os.read(fd, size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def close(self) -> None:
        """End the sandbox; when this returns, no process of it is left."""
        self.stdin.close()
        try:
            self.process.wait(GRACE_SECONDS)  # by itself: then the kernel has ended all that is inside
        except subprocess.TimeoutExpired:
            self._kill()
        self.stdout.close()
        self.stderr.close()

    def _kill(self) -> None:
        """Kill the sandbox from the inside: when its first process has ended, bwrap and all others end, too."""
        self.stdin.close()
        pid = self.process.pid
        with contextlib.suppress(OSError):
            for inside in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(inside), signal.SIGKILL)
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(pid, signal.SIGKILL)
            self.process.wait()


def _read_run(answer: dict[str, Any] | None) -> Run | None:
    """The run that an answer describes; None for an answer of another form: a program can write to the pipe, too."""
    texts, times = ("ended", "output", "error"), ("wall", "cpu", "waited")
    if answer is None or set(answer) != {*texts, *times} or not all(isinstance(answer[name], str) for name in texts):
        return None
    fine = all(isinstance(answer[name], int | float) and 0 <= answer[name] < math.inf for name in times)
    return Run(**answer) if fine and answer["waited"] <= answer["wall"] else None


def _wait_for(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))):
        raise TimeoutError


def _make_rlimits(resources: Resources) -> dict[str, int]:
    """Limits of each process of a program, without one of time, which the run has itself."""
    return {
        "RLIMIT_AS": resources.memory,
        "RLIMIT_DATA": resources.memory,  # that of whoever starts it may be less
        "RLIMIT_NPROC": resources.processes,
        "RLIMIT_NOFILE": resources.files,
        "RLIMIT_FSIZE": resources.tmp,
        "RLIMIT_STACK": min(STACK, resources.memory),
        "RLIMIT_CORE": 0,
    }


def _make_command(python: str) -> list[str]:
    return [python, "-I", "-X", "utf8", "-c", Path(program_runner.__file__).read_text()]


def _is_root() -> bool:
    return os.geteuid() == 0


def _may_enter(part: os.stat_result) -> bool:
    """Whether :data:`NOBODY` may enter a folder, or execute a file."""
    if part.st_uid == NOBODY:
        return bool(part.st_mode & stat.S_IXUSR)
    return bool(part.st_mode & (stat.S_IXGRP if part.st_gid == NOBODY else stat.S_IXOTH))


@dataclass(frozen=True, kw_only=True)
class Bubblewrap:
    """A sandbox of namespaces: no network, no processes and no files of the machine but ``/usr``, read-only.

    A program is another user than root, has no capabilities, and no variables but :data:`VARIABLES`.
    """

    bwrap: str
    python: str
    """Path of the interpreter that runs programs."""
    folders: tuple[str, ...] = ()
    """Paths that the interpreter needs besides ``/usr``, mounted read-only at the same places."""
    proc: bool = True
    """Whether programs see a ``/proc``, of their own processes.  Without it the clock of the limits is the wall's."""
    resources: Resources = field(default_factory=Resources)

    @contextlib.contextmanager
    def open(self, program: str) -> Iterator[LocalSession]:
        """A session; raises :class:`SandboxError`."""
        read, write = os.pipe()
        try:
            with os.fdopen(write, "wb") as file:
                file.write(seccomp.make_filter())
            root = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if _is_root() else {}
            session = LocalSession(self._make_command(read), program, self.resources, pass_fds=[read], cwd="/", **root)
        finally:
            os.close(read)
        with contextlib.closing(session):
            yield session

    def _make_command(self, filter_fd: int) -> list[str]:
        command = [
            self.bwrap,
            "--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY),
            "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox",
            "--clearenv", *(part for name, value in VARIABLES.items() for part in ("--setenv", name, value)),
            "--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        ]  # fmt: skip
        for name in ("/bin", "/lib", "/lib64"):
            if os.path.islink(name):
                command += ["--symlink", os.readlink(name), name]
            elif os.path.isdir(name):
                command += ["--ro-bind", name, name]
        for folder in self.folders:
            command += ["--ro-bind", folder, folder]
        command += ["--proc", "/proc"] if self.proc else []
        command += ["--dev", "/dev", "--remount-ro", "/dev"]
        for folder in ("/dev/shm", "/tmp"):
            command += ["--size", str(self.resources.tmp), "--tmpfs", folder]
        command += ["--chdir", "/tmp", "--remount-ro", "/"]
        if seccomp.make_filter():
            command += ["--seccomp", str(filter_fd)]
        return [*command, "--", *_make_command(self.python)]

    def find_closed(self) -> tuple[str, str] | None:
        """What programs of root need, and the first part of its path that their user may not enter."""
        if _is_root():
            for needed in (self.bwrap, self.python, *self.folders):
                for path in (Path(needed), Path(needed).resolve()):
                    for part in (*reversed(path.parents), path):
                        if part.exists() and not _may_enter(part.stat()):
                            return needed, str(part)
        return None

    def describe(self) -> str:
        without = "" if self.proc else ", without a /proc: time limits are wall time"
        return f"{self.bwrap}, programs run with {self.python}{without}"


@dataclass(frozen=True, kw_only=True)
class Unprotected:
    """No sandbox: a program is a process like any other of this user, with limits.  It can read and write all files."""

    python: str
    resources: Resources = field(default_factory=Resources)

    @contextlib.contextmanager
    def open(self, program: str) -> Iterator[LocalSession]:
        """A session; raises :class:`SandboxError`."""
        with tempfile.TemporaryDirectory(prefix="sglang_pat_program_", ignore_cleanup_errors=True) as folder:
            command, env = [*_make_command(self.python), folder], VARIABLES | {"HOME": folder}
            with contextlib.closing(LocalSession(command, program, self.resources, cwd=folder, env=env)) as session:
                yield session

    def describe(self) -> str:
        return f"none: programs run with {self.python} as this user, with all its rights"
