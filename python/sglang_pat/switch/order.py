"""Outputs in order, though a request changes its leader.

Before a switch the tokens of a request come from one process, after it from another; over
separate sockets the second may overtake the first, and text would be shuffled.  Each leader
numbers what it sends, and the first message it sends after a switch carries a *fence*: how many
messages of every other leader must have been delivered before it.  A leader may come out of one
switch and go into the next without having sent anything; its fence then passes on to its heirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stamped:
    """An output with its place: ``seq`` counts this rank's messages from 1."""

    rank: int
    seq: int
    fence: dict[int, int] | None
    payload: Any


def fence_after_switch(
    rank: int, sent: Mapping[int, int], unsent: Iterable[Mapping[int, int] | None]
) -> dict[int, int] | None:
    """Fence of the first output of ``rank`` after a switch.

    Args:
        sent: outputs each leader of the old layout has sent so far.
        unsent: fences of those leaders that no output has carried yet.
    """
    fence = dict(sent)
    for earlier in unsent:
        for other, seq in (earlier or {}).items():
            fence[other] = max(fence.get(other, 0), seq)
    return {other: seq for other, seq in fence.items() if other != rank and seq} or None


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
