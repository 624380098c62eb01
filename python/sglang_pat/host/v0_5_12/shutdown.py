"""What SGLang does before a crash ends it."""

from __future__ import annotations

from typing import Any


def dump_requests(manager: Any) -> None:
    """Write the requests of ``--crash-dump-folder``."""
    manager.dump_requests_before_crash()
