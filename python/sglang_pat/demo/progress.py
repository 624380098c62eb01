"""The state of a run that is under way: written by the client, read by the display."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang_pat.demo.records import Answer

RATE_SECONDS = 3.0
"""Tokens/s are those of about this last stretch of time."""


@dataclass
class Row:
    """One request."""

    prompt: str
    group: int | None = None
    sent: float | None = None
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""

    @property
    def tokens(self) -> int:
        return self.counts[-1] if self.counts else 0

    @property
    def state(self) -> str:
        if self.finish:
            return "done"
        return "running" if self.times else "waiting" if self.sent is not None else ""

    def heard(self, now: float, tokens: int) -> None:
        self.times.append(now)
        self.counts.append(tokens)

    def ended(self, now: float, tokens: int) -> None:
        """The final count; a token that ends the answer brings no text of its own."""
        if tokens > self.tokens:
            self.heard(now, tokens)

    def answer(self, index: int) -> Answer:
        return Answer(
            index=index, prompt=self.prompt, group=self.group, sent=self.sent, times=self.times,
            counts=self.counts, text=self.text, finish=self.finish,
        )  # fmt: skip


class Progress:
    """One run.

    Attributes:
        began: unix time to which all times are relative.
        heard: unix time of the last token.
        engine: the last ``/pat/status``, if one was seen.
    """

    def __init__(self, title: str, prompts: list[str]) -> None:
        self.title = title
        self.rows = [Row(prompt) for prompt in prompts]
        self.began = self.heard = time.time()
        self.engine: dict[str, Any] | None = None
        self._history: deque[tuple[float, int]] = deque()

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    def count(self, state: str) -> int:
        return sum(row.state == state for row in self.rows)

    def rate(self, now: float) -> float:
        """Tokens/s over the last :data:`RATE_SECONDS`; ``now`` is unix time."""
        self._history.append((now, self.tokens))
        while len(self._history) > 2 and now - self._history[1][0] >= RATE_SECONDS:
            self._history.popleft()
        then, tokens = self._history[0]
        return (self.tokens - tokens) / (now - then) if now > then else 0.0

    def layout(self) -> str:
        if self.engine is None:
            return "?"
        layouts = [self.engine["layout"], self.engine["target"]]
        return " → ".join("tp{tp}×dp{dp}".format(**layout) for layout in layouts if layout)

    def switches(self) -> list[dict[str, Any]]:
        """SeenSwitch records of this run so far."""
        return [r for r in self.engine["switches"] if r["started"] >= self.began] if self.engine else []
