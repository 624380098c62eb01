"""Live progress: a table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_pat.demo.progress import Progress
from sglang_pat.tools.console import Speaker

FRAMES_PER_SECOND = 4
LINE_SECONDS = 5.0
"""How often a plain line is printed."""

_STYLE = {"done": "green", "running": "cyan", "waiting": "yellow", "": "dim"}


class Display(Speaker):
    """The progress of a run."""

    @contextmanager
    def following(self, progress: Progress) -> Iterator[None]:
        """While a run is under way."""
        if self.console.is_terminal:
            live = dict(refresh_per_second=FRAMES_PER_SECOND, console=self.console, transient=True)
            with Live(get_renderable=lambda: frame(progress, time.time()), **live):
                yield
        else:
            try:
                with self.saying(lambda: line(progress, time.time()), LINE_SECONDS):
                    yield
            finally:
                self.say(line(progress, time.time()))


def line(progress: Progress, now: float) -> str:
    """The state of a run in one line; ``now`` is unix time."""
    return (
        f"  {now - progress.began:6.1f} s  {progress.count('done'):2d} of {len(progress.rows)} done, "
        f"{progress.count('running'):2d} running, {progress.tokens:5d} tokens, "
        f"{progress.rate(now):6.1f} tokens/s, {progress.layout()}, {len(progress.switches())} switches"
    )


def frame(progress: Progress, now: float) -> Group:
    """The state of a run as a picture of the terminal; ``now`` is unix time."""
    table = Table(box=None, padding=(0, 1), expand=True, header_style="bold")
    table.add_column("#", justify="right", width=2)
    table.add_column("group", width=5)
    table.add_column("prompt", no_wrap=True, ratio=2)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("answer", no_wrap=True, ratio=3)
    merged = progress.engine is not None and progress.engine["layout"]["dp"] == 1
    for index, row in enumerate(progress.rows):
        group = "" if row.group is None else "0" if merged and row.state == "running" else str(row.group)
        tail = " ".join(row.text[-200:].split())[-60:]
        table.add_row(
            str(index), group, Text(row.prompt), str(row.tokens or ""), Text(tail, style="dim"),
            style=_STYLE[row.state],
        )  # fmt: skip
    parts = [Text(progress.title, style="bold"), Text(line(progress, now)), table]
    for record in progress.switches():
        text = f"  switch tp{record['from_tp']} → tp{record['to_tp']}: "
        text += f"pause {record['pause_seconds'] * 1e3:.0f} ms, "
        text += f"{record['requests']} requests, {record['tokens']} KV tokens moved"
        parts.append(Text(text, style="bold magenta"))
    return Group(*parts)
