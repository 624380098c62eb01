"""Ends what reward functions have started: a process that outlives those that call them.

Each process of a pool is the leader of a process group of its own, and whatever its function starts belongs to it.
When the leader has ended, for whatever reason, the rest of the group is killed: it may have been killed itself, also
together with the whole job, and then nobody else knows of the group.  What leaves for a session of its own gets away.

The file is run as a script, without this project: it is small, and there at once.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
from multiprocessing.context import BaseContext

_PID = struct.Struct("=i")


class Guard:
    """The guard of one pool, a process that kills what the pool's processes leave behind.

    Attributes:
        writer: pipe to the guard, through which a process of the pool sends its id (:func:`join`).
    """

    def __init__(self, context: BaseContext) -> None:
        reader, self.writer = context.Pipe(duplex=False)
        # A session of its own: what ends the group of the job does not end it.
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=reader.fileno(), start_new_session=True)
        reader.close()

    def close(self) -> None:
        """End the guard.  When this returns, the groups of the processes that have ended are killed."""
        _send(self.writer.fileno(), 0)
        self._process.wait()
        self.writer.close()


def join(writer: int) -> None:
    """Make this process of the pool the leader of a group, and tell the guard."""
    os.setpgid(0, 0)
    _send(writer, os.getpid())


def _send(writer: int, pid: int) -> None:
    try:
        os.write(writer, _PID.pack(pid))  # so few bytes never mix with those of others
    except BrokenPipeError:  # somebody has killed the guard
        pass


def _watch(reader: int) -> None:
    """Watch the leaders until a 0 comes, or until nobody is left who could send one: then all leaders have ended."""
    leaders: dict[int, int] = {}
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    over = False
    while not over:
        ready = [fd for fd, _ in poll.poll()]
        for fd in leaders.keys() & ready:
            poll.unregister(fd)
            os.close(fd)
            _kill(leaders.pop(fd))
        if reader not in ready:
            continue
        data = os.read(reader, 1024 * _PID.size)
        over = not data
        for (pid,) in _PID.iter_unpack(data):
            if not pid:
                over = True
                break
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                _kill(pid)
            else:
                leaders[fd] = pid
                poll.register(fd, select.POLLIN)
    for pid in leaders.values():
        _kill(pid)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:  # nobody is left
        pass


if __name__ == "__main__":
    _watch(0)
