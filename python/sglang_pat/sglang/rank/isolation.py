"""A rank's dispatcher: a request that cannot be handled is answered with its error and ends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat.dropped import Dropped
from sglang_pat.messages import Cancel, Compile, Go, Prepare, Switch
from sglang_pat.sglang.controls import failed

FATAL = (Prepare, Compile, Switch, Cancel, Go)
"""Steps of a switch, and of a schedule: ranks that are not in step with each other cannot go on."""


class IsolatingDispatcher:
    """Stands for SGLang's ``TypeBasedDispatcher`` on a rank.

    All ranks of a group get the same requests in the same order, so that what fails on one fails on all of them, and
    they stay alike.  A request has changed nothing when its handling fails: SGLang queues it as its last step.
    """

    def __init__(self, inner: Callable[[Any], Any], dropped: Dropped) -> None:
        self._inner = inner
        self._dropped = dropped

    def __call__(self, obj: Any) -> Any:
        try:
            return self._inner(obj)
        except Exception as error:
            if isinstance(obj, FATAL):
                raise
            self._dropped.note(type(obj).__name__, error)
            return failed(obj, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
