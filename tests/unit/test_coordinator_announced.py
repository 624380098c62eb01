"""The coordinator and rounds that clients announce."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.coordinator.replicas import Generation
from sglang_pat.messages import LEASE_SECONDS
from sglang_pat.policies.snapshot import Decision

from .coordinator_rig import Rig
from .coordinator_world import Request

pytestmark = pytest.mark.unit


def agents(rig: Rig, turns: int, requests: int = 2) -> None:
    """An announced round of conversations: all wait for their tools at once, so the engine is empty between turns."""
    rig.coordinator.handle_round(m.BeginRound(requests=requests, lease_seconds=LEASE_SECONDS), 10.0)
    for turn in range(turns):
        rig.work(requests, now=20.0 + 10 * turn)
        rig.settle()
        rig.coordinator.handle_timer(25.0 + 10 * turn)
        rig.settle()
        rig.finish_all()
        rig.coordinator.handle_timer(29.0 + 10 * turn)
        rig.settle()


def test_agents_merge_once_a_round_and_split_once():
    rig = Rig(1, 2, policy="threshold", switch_at=4)
    for _ in range(2):
        agents(rig, turns=6)
        assert rig.coordinator.layout.tp == 2 and not rig.world.ranks[0].requests
        rig.coordinator.handle_round(m.EndRound(name="default"), 90.0)
        rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2, 1, 2, 1]


def test_weights_are_updated_in_the_middle_of_a_round():
    rig = Rig(1, 2, policy="threshold", switch_at=4)
    agents(rig, turns=2)
    rig.control("update", needs_base=True)
    rig.settle()
    for rank in (0, 1):
        rig.world.answer(rank, "update")
    rig.settle()
    assert rig.coordinator.layout.tp == 1
    rig.coordinator.handle_timer(70.0)
    rig.work(1, now=80.0)
    rig.coordinator.handle_timer(80.0)
    rig.settle()
    assert [(record.to_tp, record.reason) for record in rig.world.records][1:] == [(1, "control"), (2, "threshold")]


def test_a_long_response_keeps_its_round_though_its_client_says_nothing():
    """The client has the whole lease for the next turn when it has ended; reports are of changes only."""
    rig = Rig(1, 2, policy="threshold", switch_at=4)
    rig.coordinator.handle_round(m.BeginRound(name="agents", requests=1, lease_seconds=LEASE_SECONDS), 0.0)
    rig.work(1)
    rig.settle()
    rig.finish(0)  # they report once more, after the switch
    rig.settle()
    last = 3 * LEASE_SECONDS
    for now in range(0, int(last) + 1, 100):
        rig.coordinator.handle_timer(now)
    rig.finish_all()
    for now, is_open in ((last + 0.9 * LEASE_SECONDS, True), (last + LEASE_SECONDS, False)):
        rig.coordinator.handle_timer(now)
        assert bool(rig.coordinator._decisions.round.open) == is_open


def test_a_round_whose_client_is_gone_does_not_hold_the_engine():
    """Nor do health probes, which come for ever."""
    rig = Rig(1, 2, policy="threshold", switch_at=4)
    agents(rig, turns=1)
    for now in range(30, int(LEASE_SECONDS), 10):
        rig.coordinator.handle_timer(now)
        rig.coordinator.receive(Generation(obj=Request(10_000 + now, "work"), tokens=1, counts=False), now)
        rig.settle()
        rig.finish_all()
    assert rig.coordinator.layout.tp == 2
    rig.coordinator.handle_timer(20 + LEASE_SECONDS)
    rig.settle()
    assert rig.coordinator.layout.tp == 1


def test_the_first_round_already_starts_where_it_should_if_its_size_was_announced():
    def up_front(snapshot, history) -> Decision:
        return Decision(tp=2 if len(snapshot.coming) else snapshot.tp)

    rig = Rig(1, 2, up_front, policy="survival", profile="-")
    rig.coordinator.handle_round(m.BeginRound(requests=3, prompt_tokens=50, max_new_tokens=60), 0.0)
    rig.work(2, now=1.0)
    assert {type(obj) for _, obj in rig.world.to_leaders} == {m.Prepare}, "the requests are held"
    snapshot, decision = rig.world.decisions[-1]
    assert snapshot.coming.prompt.tolist() == [50] * 3 and decision.tp == 2 and snapshot.in_round
    rig.settle()
    assert [(record.to_tp, record.requests) for record in rig.world.records] == [(2, 0)]
    rig.work(1, now=1.0)
    rig.coordinator.handle_timer(1.2)
    assert rig.world.decisions[-1][0].complete


def test_the_prompt_of_several_responses_is_none_of_them():
    """SGLang has it computed first, by a request without a response."""
    rig = Rig(1, 2, policy="survival", profile="-", calibrate=0, decide=lambda snapshot, _: Decision(tp=snapshot.tp))
    rig.coordinator.handle_round(m.BeginRound(requests=2, prompts=1), 0.0)
    rig.coordinator.receive(Generation(obj=Request(1, "work"), tokens=5, limit=0), 1.0)
    rig.settle()
    rig.coordinator._decisions.record_response_end(m.Finished(length=0, family=1, cut=True), 1.1)
    assert not len(rig.coordinator.history)
    rig.finish_all()
    rig.serial = 1
    rig.work(1, now=1.2)
    rig.coordinator.handle_timer(1.4)
    snapshot, _ = rig.world.decisions[-1]
    assert len(snapshot.coming) == 2 and not snapshot.complete
    rig.work(1, now=1.5)
    rig.coordinator.handle_timer(1.7)
    assert rig.world.decisions[-1][0].complete
