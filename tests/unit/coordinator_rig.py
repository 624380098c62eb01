"""A coordinator with its world in single situations, for tests; no test of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.replicas import Generation
from sglang_pat.coordinator.router import Coordinator
from sglang_pat.layout import ParallelLayout

from .coordinator_world import Request, World, control, deliver


class Rig:
    """A coordinator with its world, and shorthands."""

    def __init__(
        self, tp: int = 1, dp: int = 2, decide=None, predictor=None, lending=None, costs=None, **options: Any
    ) -> None:
        self.config = AdaptiveConfig(base=ParallelLayout(tp, dp), **dict(policy="manual") | options)
        self.world = World(self.config)
        self.coordinator = Coordinator(self.config, self.world, decide, predictor, lending, costs)
        self.serial = 0

    def work(self, count: int = 1, tokens: int = 1, now: float = 0.0) -> list[int]:
        """Returns the leaders that got the requests."""
        before = len(self.world.to_leaders)
        for _ in range(count):
            self.serial += 1
            self.coordinator.receive(Generation(obj=Request(self.serial, "work"), tokens=tokens), now)
        return [rank for rank, _ in self.world.to_leaders[before:]]

    def control(self, kind: str, needs_base: bool = False, **effects: Any) -> int:
        self.serial += 1
        if needs_base:
            self.world.needs_base.add(self.serial)
        self.coordinator.receive(replace(control(self.serial, kind, needs_base), **effects), 0.0)
        return self.serial

    def iterate(self, fate: str = "fine") -> None:
        for rank in range(self.config.num_ranks):
            while self.world.ranks[rank].inbox:
                self.world.iterate(rank, (fate, 0))

    def deliver(self, *ranks: int) -> None:
        for rank in ranks or range(self.config.num_ranks):
            while self.world.ranks[rank].outbox:
                deliver(self.coordinator, self.world.ranks[rank], 0.0)

    def rounds(self, number: int, requests: int) -> None:
        """Rounds of so many requests, at time 0."""
        for _ in range(number):
            self.work(requests)
            self.settle()
            self.finish_all()

    def settle(self, fate: str = "fine") -> None:
        for _ in range(10):
            self.iterate(fate)
            self.deliver()

    def finish(self, requests: int) -> None:
        """Requests end in one step, so many of each rank."""
        for rank in range(self.config.num_ranks):
            for _ in range(requests):
                self.world.finish(rank)
        for rank in range(self.config.num_ranks):
            self.world.iterate(rank)

    def finish_all(self) -> None:
        for rank in range(self.config.num_ranks):
            while self.world.ranks[rank].requests:
                self.world.finish(rank)
            self.world.iterate(rank)
        self.settle()

    def reconfigure(self, tp: int, query_id: int = 0) -> None:
        self.coordinator.reconfigure(m.Reconfigure(query_id=query_id, tp=tp), 0.0)

    def answers(self) -> list[m.Reply]:
        return [obj for obj in self.world.server if isinstance(obj, m.Reply)]


def make_rig_with_a_fast_leader():
    """Leader 0 works in the new layout, ends both requests and reports, before rank 1 has said that it switched."""
    rig = Rig(1, 2)
    rig.rounds(1, requests=2)
    rig.work(2)
    rig.settle()
    rig.reconfigure(2)
    rig.iterate()
    rig.deliver()
    rig.iterate()
    for _ in range(2):
        rig.world.finish(0)
    rig.world.iterate(0)
    rig.deliver(0)
    return rig
