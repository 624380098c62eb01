"""What cannot be read or handled ends nothing: dropped, and answered with its error where somebody waits for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat.coordinator.controls import failed
from sglang_pat.dropped import Dropped, read
from sglang_pat.messages import Cancel, Compile, Go, Prepare, Switch

FATAL = (Prepare, Compile, Switch, Cancel, Go)
"""Steps of a switch, and of a schedule: ranks that are not in step with each other cannot go on."""


class ReadableSocket:
    """Stands for a socket of SGLang's: ``recv_pyobj`` goes on to the next frame if one cannot be read."""

    def __init__(self, socket: Any, dropped: Dropped) -> None:
        self._socket = socket
        self._dropped = dropped

    def recv_pyobj(self, flags: int = 0) -> Any:
        """Raises ``zmq.ZMQError`` as the socket does."""
        while not (found := read(self._socket.recv(flags), self._dropped)):
            pass
        return found[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class IsolatingDispatcher:
    """Stands for SGLang's ``TypeBasedDispatcher``.

    Args:
        fatal: types whose errors are raised.

    On a rank: all ranks of a group get the same requests in the same order, so that what fails on one fails on all of
    them, and they stay alike.  A request has changed nothing when its handling fails: SGLang queues it as its last
    step.
    """

    def __init__(self, inner: Callable[[Any], Any], dropped: Dropped, fatal: tuple[type, ...] = FATAL) -> None:
        self._inner = inner
        self._dropped = dropped
        self._fatal = fatal

    def __call__(self, obj: Any) -> Any:
        try:
            return self._inner(obj)
        except Exception as error:
            if isinstance(obj, self._fatal):
                raise
            self._dropped.note(type(obj).__name__, error)
            return failed(obj, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
