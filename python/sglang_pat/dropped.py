"""Messages that cannot be read or handled end nothing: they are dropped, counted, and said in the log.

In SGLang each of them ends the process that gets it, and with it the engine.  A message that cannot be read, a request
that cannot be started, a control request that fails and the account of one request harm nobody else, so the process
goes on; whoever waits is answered with the error.  The messages of a switch (:data:`FATAL`, the ranks' answers) and
what must add up after it are never dropped: an error there ends the engine.

Upstream: ``docs/upstream/one_bad_message.md``
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

from sglang_pat.messages import Cancel, Compile, Prepare, StepPermit, Switch

logger = logging.getLogger(__name__)

FATAL = (Prepare, Compile, Switch, Cancel, StepPermit)
"""Steps of a switch, and of a schedule: ranks that are not in step with each other cannot go on."""

LOG_SECONDS = 1.0
"""One line in the log for each kind in so much time; the counter has them all."""


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

    Our processes send what they can read themselves, so nobody waits for a frame that cannot be read.
    """
    try:
        return [pickle.loads(frame)]
    except Exception as error:
        dropped.note("unreadable", error)
        return []


class ReadableSocket:
    """Stands for a socket of SGLang's: ``recv_pyobj`` goes on to the next frame if one cannot be read."""

    def __init__(self, socket: Any, dropped: Dropped) -> None:
        self._socket = socket
        self._dropped = dropped

    def recv_pyobj(self, flags: int = 0) -> Any:
        """Raises ``zmq.ZMQError`` as the socket does."""
        while not (objects := read(self._socket.recv(flags), self._dropped)):
            pass
        return objects[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class IsolatingDispatcher:
    """Stands for SGLang's ``TypeBasedDispatcher``.

    Args:
        fatal: types whose errors are raised.
        answer: what to return for an object and the error of its handling.

    On a rank: all ranks of a group get the same requests in the same order, so that what fails on one fails on all of
    them, and they stay alike.  A request has changed nothing when its handling fails: SGLang queues it as its last
    step.
    """

    def __init__(
        self,
        inner: Any,
        dropped: Dropped,
        fatal: tuple[type, ...] = (),
        answer: Callable[[Any, Exception], Any] = lambda obj, error: None,
    ) -> None:
        self._inner = inner
        self._dropped = dropped
        self._fatal = fatal
        self._answer = answer

    def __call__(self, obj: Any) -> Any:
        try:
            return self._inner(obj)
        except Exception as error:
            if isinstance(obj, self._fatal):
                raise
            self._dropped.note(type(obj).__name__, error)
            return self._answer(obj, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
