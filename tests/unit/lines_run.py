"""What a call costs, whatever else the machine does; no test of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_run(call: Callable[[], Any]) -> tuple[int, Any]:
    """Lines of Python that a call executes, a cost that no other load on the machine changes; and what it returns."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(None)
    return lines, result
