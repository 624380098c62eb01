"""Where programs run that nobody has read.

Three kinds: bubblewrap (the default), a Sandbox Fusion service, and none.

The clock of the limits is the time that a program took less the time that it waited for a core: a busy machine makes
it no longer, and a program that sleeps is cut, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one program may use."""

    memory: int = 1 << 30
    """Bytes of address space of each process."""
    processes: int = 16
    """Processes and threads at once."""
    files: int = 64
    """Open files of each process."""
    output: int = 1 << 20
    """Bytes of stdout."""
    tmp: int = 64 << 20
    """Bytes in /tmp, which is memory."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a program."""

    ended: str
    """``exit``, ``error``, ``cut``, ``memory``, ``output``, or ``lost``: the sandbox itself ended."""
    output: str = ""
    """stdout; what is no UTF-8 is replaced."""
    error: str = ""
    """The last line of stderr."""
    wall: float = 0.0
    """Seconds."""
    cpu: float = 0.0
    """Seconds of all cores."""
    waited: float = 0.0
    """Seconds that it was ready and had no core."""

    @property
    def seconds(self) -> float:
        """What it took, by the clock of the limits."""
        return self.wall - self.waited


class Session(Protocol):
    """One program in one sandbox."""

    def run(self, stdin: str, limit: float) -> Run:
        """Run the program from its beginning; blocks for ``limit`` seconds at most, by the clock of the limits."""
        ...


class Sandbox(Protocol):
    """Can be pickled, so that a worker process gets it with its task."""

    def open(self, program: str) -> AbstractContextManager[Session]: ...


def make_sandbox(setting: str | Mapping[str, Any] | None, resources: Resources | None = None) -> Sandbox:
    """The sandbox that a setting names, after it has run a first program.

    Args:
        setting: None or ``bubblewrap``; ``{"url": "http://.../run_code"}``; ``none``.

    Raises:
        ValueError: another value, or it does not work on this machine; one line that names the ways out.
    """
    raise NotImplementedError
