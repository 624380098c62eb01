"""The coordinator and the lowest degree of a round, which a planner asks for."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.policies.snapshot import Decision

from .coordinator_rig import Rig

pytestmark = pytest.mark.unit


def test_a_round_waits_for_its_floor():
    rig = Rig(1, 4, policy="manual")
    rig.settle()
    rig.coordinator.round(m.BeginRound(tp=2), 0.0)
    assert rig.work(3) == [], "they wait for the switch"
    rig.settle()
    assert (rig.world.known.tp, rig.world.records[-1].reason) == (2, "planner")
    assert len(rig.world.ranks[0].requests) + len(rig.world.ranks[1].requests) == 3
    rig.finish_all()
    assert rig.world.known.tp == 2, "there the user may leave it"


def test_policies_choose_from_the_floor_up():
    seen = []

    def highest(snapshot, history):
        seen.append(snapshot.degrees)
        return Decision(tp=snapshot.degrees[-1] if snapshot.requests else snapshot.degrees[0])

    rig = Rig(1, 4, decide=highest, policy="manual")
    rig.coordinator.round(m.BeginRound(tp=2), 0.0)
    rig.settle()
    assert rig.world.known.tp == 2
    rig.work(2)
    rig.settle()
    assert rig.world.known.tp == 4
    rig.finish_all()
    rig.settle()
    assert rig.world.known.tp == 2
    assert (2, 4) in seen and seen[-1] == (2, 4)
    rig.coordinator.round(m.EndRound(name="default"), 0.0)
    rig.settle()
    assert rig.world.known.tp == 1 and seen[-1] == (1, 2, 4), "it held for that round"


def test_a_switch_to_the_floor_that_fails_is_not_repeated_at_once():
    rig = Rig(1, 2, policy="manual")
    rig.settle()
    rig.coordinator.round(m.BeginRound(tp=2), 0.0)
    rig.work(1)
    rig.settle("abort")
    assert [record.error for record in rig.world.records] == ["rank 0: no"]
    assert sum(len(rank.requests) for rank in rig.world.ranks) == 1
