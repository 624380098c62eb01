"""What a sandbox is to those who use it: a program goes in, runs come out.

The clock of the limits is what a program would take on a machine that it has for itself: the time that it and its
children had cores, divided by as many as they wanted, and the time that all of them slept.  A busy machine makes it no
longer, and a program that sleeps is cut, too, which CPU time would not do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class SandboxError(RuntimeError):
    """Error of a sandbox that does not start, or of a service that does not answer; one line."""


def format_one_line(error: BaseException) -> str:
    """The message of an error, without line breaks; the name of its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Limits of one program.  A Sandbox Fusion service takes ``memory`` and ``output`` only."""

    memory: int = 1 << 30
    """Most bytes of address space of each process."""
    processes: int = 16
    """Most processes and threads at once."""
    files: int = 64
    """Most open files of each process."""
    output: int = 1 << 20
    """Most bytes of stdout."""
    tmp: int = 64 << 20
    """Most bytes in /tmp, which is memory, and of one file."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, must be a whole number of 1 or more")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a program."""

    ended: str
    """How the run ended.  ``exit``: by itself, with code 0.  ``error``: by itself, with another code.  ``cut``: its
    time was over.  ``memory``: it got no more.  ``output``: it wrote too much.  ``lost``: the sandbox was killed."""
    output: str = ""
    """stdout; what is no UTF-8 is replaced."""
    error: str = ""
    """The last line of stderr."""
    wall: float = 0.0
    """Seconds on the wall."""
    cpu: float = 0.0
    """Seconds of all cores; 0 with a service."""
    waited: float = 0.0
    """Seconds that others kept it and its children from cores; 0 where nobody says so."""

    @property
    def seconds(self) -> float:
        """Seconds that the run took, by the clock of the limits."""
        return self.wall - self.waited


class Session(Protocol):
    """One program in one sandbox."""

    def run(self, stdin: str, limit: float, maximum: float) -> Run:
        """Run the program from its beginning.

        Files that it leaves in /tmp are there in the next run.  After a run that was ``lost`` a new session is needed.

        Args:
            limit: seconds by the clock of the limits.
            maximum: wall seconds.

        Raises:
            SandboxError: a service does not answer.
        """
        ...


class Sandbox(Protocol):
    """The setting of a sandbox, which can be pickled: a worker process gets it with its task."""

    def open(self, program: str) -> AbstractContextManager[Session]:
        """A session; raises :class:`SandboxError`."""
        ...
