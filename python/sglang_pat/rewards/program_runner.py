"""What runs inside a sandbox: it takes one program, and runs it once for each message.

Its text is given to an interpreter of the sandbox, so it imports nothing of this project.  Messages are JSON behind
four bytes of length, on stdin and stdout.  Each case gets a process of its own, forked from here: the interpreter
starts once.  A program may do to this process what it likes: all that it can change is what is said about itself, and
``local.py`` kills the whole sandbox when the time is over.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from typing import Any

KEPT_ERRORS = 4096
"""Bytes of stderr that are kept, the last ones."""
PIECE = 1 << 16


def read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def read_message(fd: int) -> Any:
    (size,) = struct.unpack(">I", read_exactly(fd, 4))
    return json.loads(read_exactly(fd, size))


def write_message(fd: int, message: Any) -> None:
    data = json.dumps(message).encode()
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def measure_wait(pid: int) -> float:
    """Seconds that the main thread of a process was ready and had no core; 0 where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def become_program(pipes: tuple[int, int, int], limits: dict[str, int]) -> None:
    """Of the forked process: its streams, its group and its limits, which it cannot raise again."""
    os.setsid()
    for fd, target in zip(pipes, (0, 1, 2), strict=True):
        os.dup2(fd, target)
    os.closerange(3, 4096)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def end_all(pid: int) -> None:
    """Kill and reap what a program has started; its own process has been reaped."""
    try:
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # all of the sandbox but this process
        else:
            os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


class Watch:
    """One run: feeds stdin, reads a bounded amount, and ends it when its time is over."""

    def __init__(self, pid: int, pipes: tuple[int, int, int], stdin: bytes, rest: dict[str, Any]) -> None:
        self.pid, self.rest = pid, rest
        self.wall = self.waited = 0.0
        self.stdin, self.stdout, self.stderr = pipes
        self.input = memoryview(stdin)
        self.output, self.errors = bytearray(), bytearray()
        self.poll = select.poll()
        self.opened = set(pipes)
        for fd in pipes:
            os.set_blocking(fd, False)
            self.poll.register(fd, select.POLLOUT if fd == self.stdin else select.POLLIN)

    def follow(self, start: float, control: int) -> str:
        """Until it ends, by itself (``exit``) or not (``cut``, ``output``), or nobody wants to know (``alone``)."""
        self.poll.register(control, select.POLLHUP)
        ended = os.pidfd_open(self.pid)
        self.poll.register(ended, select.POLLIN)
        try:
            while True:
                self.read_clock(start)
                left = min(self.rest["limit"] - self.wall + self.waited, self.rest["maximum"] - self.wall)
                if left <= 0:
                    return "cut"
                ready = [fd for fd, _ in self.poll.poll(math.ceil(left * 1000))]
                if control in ready:
                    return "alone"
                for fd in ready:
                    self._move(fd)
                if len(self.output) > self.rest["output"]:
                    return "output"
                if ended in ready:
                    while self._move(self.stdout) and len(self.output) <= self.rest["output"]:
                        pass
                    self._move(self.stderr)
                    return "exit" if len(self.output) <= self.rest["output"] else "output"
        finally:
            os.close(ended)

    def read_clock(self, start: float) -> None:
        self.wall = time.monotonic() - start
        self.waited = min(measure_wait(self.pid), self.wall)

    def _move(self, fd: int) -> bool:
        """Whether a stream moved on."""
        if fd not in self.opened:
            return False
        try:
            if fd == self.stdin:
                self.input = self.input[os.write(fd, self.input[:PIECE]) :]
                if not self.input:
                    self._close(fd)
                return True
            piece = os.read(fd, PIECE)
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it reads no more
            piece = b""
        if not piece:
            self._close(fd)
        elif fd == self.stdout:
            self.output += piece
        else:
            self.errors = (self.errors + piece)[-KEPT_ERRORS:]
        return bool(piece)

    def _close(self, fd: int) -> None:
        self.poll.unregister(fd)
        self.opened.remove(fd)
        os.close(fd)

    def close(self) -> None:
        for fd in list(self.opened):
            self._close(fd)


def run_case(case: dict[str, Any], control: int, rlimits: dict[str, int]) -> dict[str, Any] | None:
    """What happened; None in the forked process, which has to become the program."""
    (in_read, in_write), (out_read, out_write), (err_read, err_write) = (os.pipe() for _ in range(3))
    start = time.monotonic()
    pid = os.fork()
    if not pid:
        # Of each process; only one that nobody watches any more gets there.
        longest = math.ceil(case["maximum"] + 1) * rlimits["RLIMIT_NPROC"]
        become_program((in_read, out_write, err_write), rlimits | {"RLIMIT_CPU": longest})
        return None
    for fd in (in_read, out_write, err_write):
        os.close(fd)
    watch = Watch(pid, (in_write, out_read, err_read), case["stdin"].encode(errors="replace"), case)
    ended = watch.follow(start, control)
    if ended != "cut":  # what is cut reports the clock that cut it
        watch.read_clock(start)
    if ended != "exit":
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    end_all(pid)
    watch.close()
    if ended == "alone":
        os._exit(1)
    code = os.waitstatus_to_exitcode(status)
    errors = watch.errors.decode(errors="replace").strip()
    said = errors.splitlines()[-1][-500:] if errors else ""
    if ended == "exit" and code:
        ended = "memory" if code == -signal.SIGKILL or "MemoryError" in errors else "error"
    return {
        "ended": ended,
        "output": watch.output[: case["output"]].decode(errors="replace"),
        "error": said or (f"ended with {code}" if ended in ("error", "memory") else ""),
        "wall": watch.wall,
        "cpu": usage.ru_utime + usage.ru_stime,
        "waited": watch.waited,
    }


def main() -> str | None:
    """Answer until nobody asks any more; in a forked process the text of the program."""
    control, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    first = read_message(control)
    write_message(answers, {"ready": os.getpid()})
    while True:
        try:
            case = read_message(control)
        except EOFError:
            os._exit(0)
        found = run_case(case, control, first["rlimits"])
        if found is None:
            return first["program"]
        write_message(answers, found)


if __name__ == "__main__":
    program = main()
    assert program is not None
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(program, "program.py", "exec"), module.__dict__)
