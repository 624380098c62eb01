"""Outputs in order, though a request changes its leader.

Before a switch the tokens of a request come from one process, after it from another; over
separate sockets the second may overtake the first, and text would be shuffled.  Each leader
numbers what it sends, and the first message it sends after a switch carries a *fence*: how many
messages of every other leader must have been delivered before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stamped:
    """An output with its place: ``seq`` counts this rank's messages from 1."""

    rank: int
    seq: int
    fence: dict[int, int] | None
    payload: Any


@dataclass
class OutputOrder:
    """Delivers :class:`Stamped` messages so that every fence holds; holds the others back."""

    _delivered: dict[int, int] = field(default_factory=dict)
    _held: dict[int, deque[Stamped]] = field(default_factory=dict)

    def push(self, message: Stamped) -> list[Any]:
        """Take a message; returns the payloads that may go on now, in order."""
        self._held.setdefault(message.rank, deque()).append(message)
        ready: list[Any] = []
        progress = True
        while progress:
            progress = False
            for queue in self._held.values():
                while queue and self._holds(queue[0].fence):
                    head = queue.popleft()
                    self._delivered[head.rank] = head.seq
                    ready.append(head.payload)
                    progress = True
        return ready

    def _holds(self, fence: dict[int, int] | None) -> bool:
        return not fence or all(self._delivered.get(rank, 0) >= seq for rank, seq in fence.items())
