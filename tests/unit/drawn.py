"""How many inputs a property test draws."""

from __future__ import annotations

import os

from hypothesis import settings


def examples(count: int) -> settings:
    """``count`` inputs where others are drawn in each run (``make soak``), a quarter of them, at least ten, else."""
    search = os.environ.get("HYPOTHESIS_PROFILE") == "search"
    return settings(max_examples=count if search else max(10, count // 4))
