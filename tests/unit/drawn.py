"""How many inputs a test draws: all in ``make soak``, where they are others in each run, and some elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis import settings


def fewer(count: int) -> int:
    """``count`` in ``make soak``, a quarter of it, at least ten, else."""
    return count if os.environ.get("HYPOTHESIS_PROFILE") == "search" else max(10, count // 4)


def examples(count: int) -> settings:
    """Settings of a property test with :func:`fewer` of ``count`` inputs."""
    from hypothesis import settings

    return settings(max_examples=fewer(count))
