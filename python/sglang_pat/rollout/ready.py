"""Complete groups that may be returned, found without going through those that may not."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from sglang_pat.rollout.records import Group


class Ready:
    """By how many more rounds they may wait, each class in the order of completion."""

    def __init__(self) -> None:
        self._completed: dict[int, int] = {}
        self._classes: dict[int, list[tuple[int, int]]] = {}
        self._look = False

    def completed(self, group: Group) -> None:
        """It is the last to have been completed."""
        self._completed[group.order] = len(self._completed)

    def add(self, group: Group, least: int) -> None:
        """It may be returned; ``least``: how many more rounds it may wait."""
        heapq.heappush(self._classes.setdefault(least, []), (self._completed[group.order], group.order))
        self._look = True

    def look_again(self) -> None:
        """What may be returned has changed."""
        self._look = True

    def has(self, may_take: Callable[[int], bool]) -> bool:
        """Whether there is one for :meth:`pop`."""
        return self._class(may_take) is not None

    def pop(self, may_take: Callable[[int], bool]) -> int | None:
        """The order of the first completed of those whose class may be taken now; None if there is none."""
        least = self._class(may_take)
        return None if least is None else heapq.heappop(self._classes[least])[1]

    def _class(self, may_take: Callable[[int], bool]) -> int | None:
        if not self._look:
            return None
        found = [(heap[0], least) for least, heap in self._classes.items() if heap and may_take(least)]
        self._look = bool(found)
        return min(found)[1] if found else None
