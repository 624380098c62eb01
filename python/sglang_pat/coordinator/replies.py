"""Control requests, which go to all leaders, and their replies, of which the server gets one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control request: goes to all leaders.

    Attributes:
        reply: name of the reply's type, or None if there is none.
        merge: makes one reply of all leaders' replies, which come in the order of their ranks.
        failed: whether such a reply says that nothing was done.
        refusal: makes such a reply, of a reason.
        needs_base: only the base layout can do it (weights, memory).
        pauses: True stops generation, False lets it go on.
        releases, resumes: memory it gives away and takes back, by SGLang's tags; ``changes``: of these, what was not so
            before.
    """

    obj: Any
    reply: str | None = None
    merge: Callable[[list[Any]], Any] = lambda replies: replies[0]
    failed: Callable[[Any], bool] = lambda reply: False
    refusal: Callable[[str], Any] = lambda reason: None
    needs_base: bool = False
    pauses: bool | None = None
    releases: frozenset[str] = frozenset()
    resumes: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()


@dataclass
class _Collect:
    """Replies to one control request, by leader."""

    control: Control
    expected: int
    replies: dict[int, Any] = field(default_factory=dict)


class Replies:
    """The control requests under way, by the type of their reply, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Collect]] = {}

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def expect(self, control: Control, leaders: int) -> None:
        """``control`` was sent to so many leaders; no-op if it has no reply."""
        if control.reply:
            self._waiting.setdefault(control.reply, deque()).append(_Collect(control, leaders))

    def take(self, rank: int, obj: Any) -> list[tuple[Control, Any]] | None:
        """A leader's reply: ``[(request, merged)]`` once those of all leaders are there, ``[]`` before.

        None if it is no reply that is waited for.
        """
        collect = self._of(rank, obj)
        if collect is None:
            return None
        collect.replies[rank] = obj
        if len(collect.replies) < collect.expected:
            return []
        name = type(obj).__name__
        waiting = self._waiting[name]
        waiting.popleft()  # complete before any later one, as each leader fills them in order
        if not waiting:
            del self._waiting[name]
        merged = collect.control.merge([collect.replies[leader] for leader in sorted(collect.replies)])
        return [(collect.control, merged)]

    def _of(self, rank: int, obj: Any) -> _Collect | None:
        """The collection that the reply of a leader belongs to.

        Leaders answer requests of one type in the order they got them, but not in step with each other: it is the
        oldest one that still lacks this leader's.
        """
        waiting = self._waiting.get(type(obj).__name__, ())
        return next((collect for collect in waiting if rank not in collect.replies), None)
