"""Messages that could not be handled: dropped, counted, and said in the log.

What may be dropped and what may not: a message that cannot be read, a request that cannot be started, a control request
that fails and the account of one request harm nobody else, so the process goes on.  The messages of a
switch (``Prepare``, ``Compile``, ``Switch``, ``Cancel``, the ranks' answers) and what must add up after it are never
dropped: an error there ends the engine.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

LOG_SECONDS = 1.0
"""One line in the log for each kind in so much time; the counter has them all."""

MAX_KINDS = 64
"""Kinds that are told apart; others count as ``other``."""


class Dropped:
    """What one process has dropped.

    Args:
        metrics: whether ``/metrics`` has ``sglang_pat_dropped_messages_total``.

    Attributes:
        total: messages dropped so far.
    """

    def __init__(self, metrics: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        self._counter: Any = None
        if metrics:
            # Decides on import whether it works across processes, by an environment variable that SGLang sets late.
            from prometheus_client import Counter

            self._counter = Counter(
                "sglang_pat_dropped_messages_total", "Messages that could not be handled.", ["kind"]
            )

    def note(self, kind: str, error: BaseException) -> None:
        """A message of this kind (the name of its type) was dropped for ``error``, which is being handled."""
        kind = kind if kind in self._logged or len(self._logged) < MAX_KINDS else "other"
        self.total += 1
        if self._counter is not None:
            self._counter.labels(kind).inc()
        now = self._clock()
        if now < self._logged.get(kind, float("-inf")) + LOG_SECONDS:
            self._silent[kind] = self._silent.get(kind, 0) + 1
            return
        self._logged[kind] = now
        silent = self._silent.pop(kind, 0)
        more = f" (and {silent} more before it)" if silent else ""
        logger.error("dropped a message: %s%s: %s", kind, more, error, exc_info=error)


def read(frame: bytes, dropped: Dropped) -> list[Any]:
    """The object that another of our processes has sent, alone in a list; none if it cannot be read.

    Our processes send what they can read themselves: what cannot be read is none of their messages, and nobody waits
    for it.
    """
    try:
        return [pickle.loads(frame)]
    except Exception as error:
        dropped.note("unreadable", error)
        return []
