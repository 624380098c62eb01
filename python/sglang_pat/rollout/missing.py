"""What a group is worth in which rewards are missing, as their function failed: one rule, in every framework."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final


class Missing(enum.Enum):
    """One value, which is no number."""

    REWARD = enum.auto()


MISSING: Final = Missing.REWARD
"""What a reward function of ``rollout`` returns if nobody knows what a response is worth."""


def choose_rewarded(has_reward: Sequence[bool]) -> list[int]:
    """Indexes of a group's samples that are trained on.

    One without a reward is not: nobody knows what it is worth.  The others are compared with each other alone.  One of
    several that is left alone has nothing to be compared with, and is left out, too.
    """
    indexes = [index for index, has in enumerate(has_reward) if has]
    return indexes if len(indexes) > 1 or len(has_reward) == 1 else []
