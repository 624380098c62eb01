"""Live progress: a line that changes on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.live import Live
from rich.text import Text

from sglang_pat.tools.console import Speaker

FRAMES_PER_SECOND = 4
LINE_SECONDS = 10.0
"""How often a plain line is printed."""

BAR = 30
"""Characters."""


@dataclass
class Progress:
    """A run that is under way: written by who runs it, read by the display.

    Attributes:
        began: unix time.
        done, tokens: responses that are complete, and their tokens.
    """

    title: str
    requests: int
    began: float = field(default_factory=time.time)
    done: int = 0
    tokens: int = 0
    layout: str = ""


class Display(Speaker):
    """The progress of a run."""

    @contextmanager
    def following(self, progress: Progress) -> Iterator[None]:
        """While a run is under way."""
        if self.console.is_terminal:
            live: dict[str, Any] = dict(refresh_per_second=FRAMES_PER_SECOND, console=self.console, transient=True)
            with Live(get_renderable=lambda: Text("  " + line(progress, time.time())), **live):
                yield
        else:
            with self.saying(lambda: "  " + line(progress, time.time()), LINE_SECONDS):
                yield


def line(progress: Progress, now: float) -> str:
    """The state of a run; ``now`` is unix time."""
    full = round(BAR * progress.done / progress.requests)
    return (
        f"{progress.title}: {'█' * full}{'░' * (BAR - full)} {progress.requests - progress.done:3d} of "
        f"{progress.requests} left, {progress.layout or '?'}, {now - progress.began:5.1f} s"
    )
