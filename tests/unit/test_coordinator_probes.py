"""Health probes come at any time: they are no part of a round, and move nothing."""

from __future__ import annotations

import pytest

from sglang_pat.coordinator.replicas import Generation
from sglang_pat.policies.registry import stay

from .coordinator_rig import Rig
from .coordinator_world import Request
from .test_coordinator_rounds import known_rounds

pytestmark = pytest.mark.unit


def probe(rig: Rig, now: float) -> None:
    rig.serial += 1
    rig.coordinator.receive(Generation(obj=Request(rig.serial, "work"), tokens=1, counts=False), now)


def test_a_probe_moves_no_idle_engine():
    """Though the policy would start a round of the known size in another layout."""
    rig = known_rounds()
    probe(rig, 50.0)
    rig.coordinator.tick(51.0)
    rig.settle()
    rig.finish_all()
    rig.coordinator.tick(60.0)
    rig.settle()
    assert not rig.world.records
    rig.work(3, now=70.0)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2], "a round does"


def test_threshold_does_not_merge_for_a_probe():
    """As it does for what is left once nothing has come for a second."""
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    probe(rig, 50.0)
    rig.settle()
    rig.coordinator.tick(50.5)  # it has a single token to generate
    rig.settle()
    assert rig.world.preparing is None and not rig.world.records
    rig.finish_all()
    rig.work(1, now=70.0)
    rig.settle()
    rig.coordinator.tick(80.0)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2], "for a request it does"


def test_a_probe_in_a_round_does_not_make_it_larger():
    rig = Rig(1, 2, stay, policy="survival", profile="-")
    tracker = rig.coordinator._decisions.round
    for number in range(4):
        now = 100.0 * number
        rig.work(2, now=now)
        if number % 2:
            probe(rig, now + 0.001)
        rig.work(4, now=now + 0.002)
        rig.settle()
        assert tracker.came == 6 and tracker.complete == (number > 1)
        rig.finish_all()
        rig.coordinator.tick(now + 50)
