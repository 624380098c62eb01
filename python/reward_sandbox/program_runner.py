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
from typing import Any, NamedTuple, NoReturn

KEPT_ERRORS = 4096
"""Bytes of stderr that are kept, from its end."""
PIECE = 1 << 16
TICKS = os.sysconf("SC_CLK_TCK")
LOOKS = 0.005, 0.05
"""Seconds between two looks at a program, at least and at most; between them a tenth of its time so far."""
PR_SET_CHILD_SUBREAPER = 36


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


class Look(NamedTuple):
    """A process's descendants at one moment."""

    cpu: float
    """Seconds of all cores that the descendants took, ended ones included."""
    ready: int
    """Threads that have a core or want one."""


def look(pid: int, itself: bool = False) -> Look | None:
    """The descendants of a process; None where the kernel does not say.

    Args:
        itself: whether the process counts, too.
    """
    cpu, ready, todo, seen = 0.0, 0, [pid], 0
    while todo:
        here = todo.pop()
        try:
            for thread in os.listdir(f"/proc/{here}/task"):
                with open(f"/proc/{here}/task/{thread}/children") as file:
                    todo += map(int, file.read().split())
                seen += 1
                if itself or here != pid:
                    ready += read_stat(f"{here}/task/{thread}")[0] == "R"
            if itself or here != pid:
                cpu += sum(map(int, read_stat(str(here))[11:15])) / TICKS  # itself, and children that it waited for
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
    return Look(cpu, ready) if seen else None


def read_stat(name: str) -> list[str]:
    """Fields of ``/proc/name/stat`` from the state on; the name before it may have any character."""
    with open(f"/proc/{name}/stat") as file:
        return file.read().rpartition(")")[2].split()


class Clock:
    """Seconds that a program would take on a machine that it has for itself, as far as this can be seen.

    While any of its threads, or of those of its descendants, wants a core: the time that they had cores, divided by as
    many cores as they want.  While all sleep: the time on the wall.  So others do not make it run, and what a program's
    own children take from it does.

    Args:
        before: seconds that this process's children had taken when the program began.
    """

    def __init__(self, before: float, cores: int) -> None:
        self.before, self.cores = before, cores
        self.wall = self.seconds = self.cpu = 0.0
        self.ready = 1

    def move(self, wall: float, state: Look | None) -> None:
        """Move the clock to ``wall`` seconds from the beginning, where ``state`` was seen."""
        passed, self.wall = wall - self.wall, wall
        if state is None:
            self.seconds += passed
            return
        used, self.cpu = max(0.0, state.cpu - self.before - self.cpu), max(self.cpu, state.cpu - self.before)
        busy = used / min(max(self.ready, state.ready, 1), self.cores)
        asleep = ((not self.ready) + (not state.ready)) / 2 * max(0.0, passed - busy)
        self.seconds, self.ready = min(self.seconds + busy + asleep, wall), state.ready


def measure_children() -> float:
    """Seconds of all cores that ended children of this process took, with their own children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def become_program(pipes: tuple[int, int, int], limits: dict[str, int]) -> None:
    """Give the forked process its streams, its group and its limits, which it cannot raise again."""
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
            for child in find_children():  # also what has left for a session of its own
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    except (ChildProcessError, ProcessLookupError):
        pass


def find_children() -> list[int]:
    """Ids of the children of this process, which is also the parent of all orphans among its descendants."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return list(map(int, file.read().split()))
    except OSError:
        return []


class Watch:
    """One run of the program: it feeds stdin, reads a bounded amount, and ends the program when its time is over."""

    def __init__(self, pid: int, pipes: tuple[int, int, int], stdin: bytes, rest: dict[str, Any]) -> None:
        self.pid, self.rest = pid, rest
        self.clock = Clock(measure_children(), len(os.sched_getaffinity(0)))
        self.stdin, self.stdout, self.stderr = pipes
        self.input = memoryview(stdin)
        self.output, self.errors = bytearray(), bytearray()
        self.poll = select.poll()
        self.opened = set(pipes)
        for fd in pipes:
            os.set_blocking(fd, False)
            self.poll.register(fd, select.POLLOUT if fd == self.stdin else select.POLLIN)

    def follow(self, start: float, control: int) -> str:
        """Follow the run to its end, and return why: it ended by itself (``exit``) or by a limit (``cut``, ``output``),
        or nobody waits for it any more (``alone``)."""
        self.poll.register(control, select.POLLHUP)
        ended = os.pidfd_open(self.pid)
        self.poll.register(ended, select.POLLIN)
        try:
            while True:
                self.read_clock(time.monotonic() - start)
                wall = self.clock.wall
                left = min(self.rest["limit"] - self.clock.seconds, self.rest["maximum"] - wall)
                if left <= 0:
                    return "cut"
                shortest, longest = LOOKS
                wait = max(shortest, min(longest, left, wall / 10))
                ready = [fd for fd, _ in self.poll.poll(math.ceil(wait * 1000))]
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

    def read_clock(self, wall: float, ended: bool = False) -> None:
        state = look(os.getpid())
        if state is not None:
            # Until it ended it did as before.
            state = Look(state.cpu + measure_children(), self.clock.ready if ended else state.ready)
        self.clock.move(wall, state)

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


def leave(code: int) -> NoReturn:
    """End, and with the folder of a program that has no sandbox: whoever made it may have been killed."""
    if sys.argv[1:]:
        import shutil

        shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(code)


def run_case(case: dict[str, Any], control: int, rlimits: dict[str, int]) -> dict[str, Any] | None:
    """Run the program, and return what happened; None in the forked process, which has to become the program."""
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
    wall = time.monotonic() - start
    if ended != "exit":
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    if ended == "exit":  # what is cut reports the clock that cut it
        watch.read_clock(wall, ended=True)
    end_all(pid)
    watch.close()
    if ended == "alone":
        leave(1)
    code = os.waitstatus_to_exitcode(status)
    errors = watch.errors.decode(errors="replace").strip()
    message = errors.splitlines()[-1][-500:] if errors else ""
    if ended == "exit" and code:
        ended = "memory" if code == -signal.SIGKILL or "MemoryError" in errors else "error"
    return {
        "ended": ended,
        "output": watch.output[: case["output"]].decode(errors="replace"),
        "error": message or (f"ended with {code}" if ended in ("error", "memory") else ""),
        "wall": watch.clock.wall,
        "cpu": usage.ru_utime + usage.ru_stime,
        "waited": watch.clock.wall - watch.clock.seconds,
    }


def main() -> str:
    """Answer until nobody asks any more, which is an error; in a forked process the text of the program."""
    control, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if os.getpid() != 1:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    first = read_message(control)
    write_message(answers, {"ready": os.getpid()})
    while True:
        report = run_case(read_message(control), control, first["rlimits"])
        if report is None:
            return first["program"]
        write_message(answers, report)


if __name__ == "__main__":
    try:
        program = main()
    except (EOFError, BrokenPipeError):
        leave(0)
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(program, "program.py", "exec"), module.__dict__)
