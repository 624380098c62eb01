"""What the reward workers of a verl job share, with each other and with its trainer: one named Ray actor.

Its death costs a job nothing that it trains on: Ray starts it anew, and it is empty then.  Workers keep the anchors of
their time limits, too, and bring them back (:meth:`RewardLedger.share_anchors`).  Ends of responses that are lost are
known when verl has written the responses.  The figures of the step are those since then.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping

import ray
from ray.actor import ActorHandle

NAME = "sglang_pat_rewards"

Figures = Mapping[str, float]
"""Sums of a step by name; those whose name ends with :data:`LARGEST` are the largest value."""
LARGEST = "/max"


class RewardLedger:
    """The actor."""

    def __init__(self) -> None:
        self._ends: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._asked_for_ends = False
        self._figures: dict[str, float] = {}
        self._anchors: dict[str, float] = {}
        self._dropped: frozenset[str] = frozenset()
        self._drops = 0
        self._news = asyncio.Condition()

    async def note_end(self, uid: str, session: int, tokens: int) -> None:
        """A response has ended, and its reward is on its way."""
        if self._asked_for_ends:
            self._ends[uid][session] = tokens

    async def take_ends(self) -> dict[str, dict[int, int]]:
        """Tokens of the responses that have ended since the last call, by uid and session."""
        self._asked_for_ends = True
        found, self._ends = dict(self._ends), defaultdict(dict)
        return found

    async def drop(self, uids: Iterable[str]) -> None:
        """Nobody will train on the responses of these prompts; on those of the drop before, nobody waits any more."""
        async with self._news:
            self._dropped, self._drops = frozenset(uids), self._drops + 1
            self._news.notify_all()

    async def wait_for_drop(self, known: int) -> tuple[int, frozenset[str]]:
        """Number and prompts of the last drop, as soon as it is another one than ``known``."""
        async with self._news:
            await self._news.wait_for(lambda: self._drops != known)
            return self._drops, self._dropped

    async def add_figures(self, figures: Figures) -> None:
        """Of one reward, or more."""
        add_figures(self._figures, figures)

    async def take_figures(self) -> dict[str, float]:
        """Since the last call."""
        found, self._figures = self._figures, {}
        return found

    async def share_anchors(self, anchors: Mapping[str, float]) -> dict[str, float]:
        """Those of all who ever called; the larger one where two differ."""
        for name, seconds in anchors.items():
            self._anchors[name] = max(seconds, self._anchors.get(name, 0.0))
        return self._anchors


def add_figures(total: dict[str, float], figures: Figures) -> None:
    """Add ``figures`` to a ``total``."""
    for name, value in figures.items():
        total[name] = max(total.get(name, value), value) if name.endswith(LARGEST) else total.get(name, 0.0) + value


def connect() -> ActorHandle:
    """The job's ledger, which is made by the first who asks."""
    # A call that is under way when the actor dies is made again.  So figures may count twice then.
    options = {"name": NAME, "get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(RewardLedger).options(**options).remote()
