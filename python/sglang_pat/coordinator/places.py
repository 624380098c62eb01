"""Which replica a request goes to."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_pat.coordinator.leader import Generation, Leader
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.prompts import allowance

REMEMBERED = 512
"""So many long prompts, those that were sent last."""


class Places:
    """Which leader was last sent each long prompt: siblings find it in the radix tree of that replica.

    What has left the tree since is computed again, as anywhere else.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def choose(
        self, request: Generation, layout: ParallelLayout, leaders: Mapping[int, Leader], response: float
    ) -> int:
        """The leader with the least load; or the one that has the prompt, if it is long and that replica not much
        fuller.

        Args:
            layout: the one in force, whose ``leaders`` these are, by rank.
            response: tokens that a response is expected to have.
        """
        least = min(layout.leaders, key=lambda rank: leaders[rank].cost)
        if request.family is None:
            return least
        # A merged replica has what its parts had.
        has = layout.group_of(self._last.pop(request.family, least))
        fuller = leaders[has].requests - leaders[least].requests
        chosen = has if fuller <= allowance(request.tokens - request.generated, response) else least
        self._last[request.family] = chosen
        if len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]
        return chosen
