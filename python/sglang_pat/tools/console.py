"""Talking on a console (:class:`Speaker`): live on a terminal, plain lines anywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

WIDTH = 120
"""Columns of what is not a terminal."""

LINE_SECONDS = 10.0
"""Seconds between two plain lines that say how far something is."""


def make() -> Console:
    """A console on stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


class Speaker:
    """Prints on ``console``."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def show_waiting(self, what: str) -> Iterator[None]:
        """While something takes its time."""
        if self.console.is_terminal:
            with self.console.status(escape(what)):
                yield
        else:
            self.say(f"{what} ...")
            yield

    @contextmanager
    def show_progress(self, line: Callable[[], str]) -> Iterator[None]:
        """Say how far something is while it goes on."""
        if self.console.is_terminal:
            with Live(get_renderable=lambda: Text(line()), refresh_per_second=4, console=self.console, transient=True):
                yield
            return
        over = threading.Event()

        def print_lines() -> None:
            while not over.wait(LINE_SECONDS):
                self.say(line())

        thread = threading.Thread(target=print_lines, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
