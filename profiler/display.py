"""Progress of a sweep: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.text import Text

from sglang_pat.tools import console


@dataclass
class Progress:
    """State of a sweep: written by the sweep, read by the display.

    Attributes:
        total, done, left_out: points.
        what: being measured now.
        ends: monotonic seconds at which the budget is used up.
        notes: points that could not be measured, and why.
    """

    total: int
    done: int
    ends: float
    left_out: int = 0
    what: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        left = clock(max(0.0, self.ends - time.monotonic()))
        text = f"  {self.done:3d} of {self.total} points, {left} left: {self.what}"
        return text + (f"; {self.left_out} left out" if self.left_out else "")


class Display(console.Speaker):
    """The progress of a sweep."""

    def following(self, progress: Progress) -> AbstractContextManager[None]:
        def frame() -> Group:
            bar = ProgressBar(total=max(1, progress.total), completed=progress.done + progress.left_out, width=60)
            return Group(bar, Text(progress.line), *(Text(note, style="dim") for note in progress.notes[-3:]))

        return self.showing(lambda: progress.line, frame)


def clock(seconds: float) -> str:
    """Seconds as ``m:ss``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def make() -> Display:
    return Display(console.make())
