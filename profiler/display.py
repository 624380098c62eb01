"""Progress of a sweep: a panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.text import Text

from sglang_pat.tools import console

NOTES = 3


class Progress:
    """State of a sweep: written by the session, read by the display.

    Attributes:
        total, done, left_out: points.
        what: being measured now.
        others: share of the cores that other programs took, 0 to 1.
        notes: last points that could not be measured, and why.
    """

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.left_out = total, done, 0
        self.resumed = done
        self.what, self.layout, self.others = "", "", 0.0
        self.notes: list[str] = []
        self.began = time.monotonic()
        self._ends = self.began

    def note(self, text: str) -> None:
        self.notes = [*self.notes, text][-NOTES:]

    def expect(self, seconds: float) -> None:
        """The sweep is expected to go on for so long from now."""
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._ends - time.monotonic())


class Display(console.Speaker):
    """The progress of a sweep."""

    def following(self, progress: Progress) -> AbstractContextManager[None]:
        return self.showing(lambda: line(progress), lambda: frame(progress))


def clock(seconds: float) -> str:
    """Seconds as ``m:ss``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def line(progress: Progress) -> str:
    """The state of a sweep in one line."""
    planned = progress.total - progress.left_out
    text = f"  {progress.done:3d} of {planned} points, {clock(progress.left)} left: {progress.what}"
    return text + (f"; {progress.left_out} left out for the budget" if progress.left_out else "")


def frame(progress: Progress) -> Group:
    """The same as a picture of the terminal."""
    planned = max(1, progress.total - progress.left_out)
    parts = [
        ProgressBar(total=planned, completed=min(progress.done, planned), width=60),
        Text(
            f"{progress.done} of {planned} points  ·  {clock(time.monotonic() - progress.began)} gone, "
            f"{clock(progress.left)} left",
            style="bold",
        ),
        Text(progress.what, style="cyan"),
    ]
    if progress.left_out:
        parts.append(Text(f"{progress.left_out} points left out for the budget", style="yellow"))
    if progress.others > 0.1:
        parts.append(Text(f"other programs take {progress.others:.0%} of the cores", style="yellow"))
    return Group(*parts, *(Text(note, style="dim") for note in progress.notes))


def make() -> Display:
    return Display(console.make())
