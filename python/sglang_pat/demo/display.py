"""Live progress: a line that changes on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from sglang_pat.tools.console import Speaker

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

    def following(self, progress: Progress) -> AbstractContextManager[None]:
        """While a run is under way."""
        return self.showing(lambda: "  " + line(progress, time.time()))


def line(progress: Progress, now: float) -> str:
    """The state of a run; ``now`` is unix time."""
    full = round(BAR * progress.done / progress.requests)
    return (
        f"{progress.title}: {'█' * full}{'░' * (BAR - full)} {progress.requests - progress.done:3d} of "
        f"{progress.requests} left, {progress.layout or '?'}, {now - progress.began:5.1f} s"
    )
