"""When GPUs that generate go over to training in the middle of a round (RollPacker, section 4.4, Algorithm 1).

At each milestone, from 20 to 50% of the batch in steps of 5%, they go if the rest's projected peak KV fits the others.
Later in the round they stay until it is over.  A batch is counted in whole groups, as the trainer takes it: an
advantage needs all responses to its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_pat.policies.lending import LAST_MILESTONE, Milestones


def project_peak(lengths: Sequence[int], done: int, responses: int, prompt_tokens: float, limit: int) -> float:
    """KV tokens that the rest of a round is expected to hold at most.

    Those that still run are the longest of the round, and keep pace: when one of them ends, the others are as long.

    Args:
        lengths: of responses of earlier rounds, in tokens; none: all that run go on to the limit.
        done: responses of this round that have ended, of so many ``responses``.
        prompt_tokens: of a prompt, on average.
        limit: tokens of a response at most.
    """
    left = responses - done
    if left <= 0:
        return 0.0
    ranks = (done + np.arange(left) + 0.5) / responses
    ends = np.quantile(lengths, ranks, method="inverted_cdf") if len(lengths) else np.full(left, limit)
    return float((np.arange(left, 0, -1) * (np.minimum(ends, limit) + prompt_tokens)).max())


@dataclass(kw_only=True)
class ScaleDown:
    """Of one round; asked whenever something has ended.

    Attributes:
        groups: of the batch.
        room: KV tokens of the engines that go on.
        milestones: that are passed.
    """

    groups: int
    room: float
    milestones: Milestones = field(default_factory=Milestones)

    def is_due(self, complete: int, peak: float) -> bool:
        """Whether GPUs go over to training now.

        Args:
            complete: groups.
            peak: projected, in KV tokens (:func:`project_peak`).
        """
        share = complete / self.groups
        if share >= 1:
            return True
        return self.milestones.reach(share) and share <= LAST_MILESTONE and peak <= self.room
