"""When the coordinator asks its policy, and what of (all interleavings: test_coordinator_machine.py)."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.coordinator.decisions import DECISION_INTERVAL_SECONDS
from sglang_pat.coordinator.replicas import Generation
from sglang_pat.policies.registry import keep_layout, make_policy
from sglang_pat.policies.snapshot import Decision

from .coordinator_rig import Rig, make_rig_with_a_fast_leader
from .coordinator_world import Request
from .policy_world import crossing, machine

pytestmark = pytest.mark.unit


def test_policies_see_requests_that_no_leader_has_taken_yet():
    """A long prefill keeps them in the socket; a batch that is half visible looks like a small one."""
    rig = Rig(1, 2, keep_layout, policy="survival", profile="-")
    rig.work(3, tokens=7)
    rig.coordinator.handle_timer(DECISION_INTERVAL_SECONDS)
    load = rig.world.decisions[-1][0].load
    assert load.prompt.tolist() == [7, 7, 7] and load.replica.tolist() == [0, 0, 1] and len(set(load.family)) == 3
    rig.settle()
    rig.coordinator.handle_timer(2 * DECISION_INTERVAL_SECONDS)
    load = rig.world.decisions[-1][0].load
    assert load.prompt.tolist() == [4, 4, 4] and load.output.tolist() == [6, 6, 6], "as the leaders report them"


def test_siblings_on_their_way_are_known_where_prompts_are_long():
    rig = Rig(1, 2, keep_layout, policy="survival", profile="-")
    for family in (7, 8, 7, None):
        rig.coordinator.receive(Generation(obj=Request(0, "work"), tokens=8192, family=family), 0.0)
    rig.coordinator.handle_timer(DECISION_INTERVAL_SECONDS)
    families = rig.world.decisions[-1][0].load.family.tolist()
    assert sorted(families)[1:] == [7, 7, 8] and min(families) < 0


def test_policies_are_shown_by_what_the_profile_is_off():
    """Steps that leaders report, against what the profile says of such a batch beside as many busy replicas."""

    class Predictor:
        asked = []

        def step_seconds(self, *query):
            self.asked.append(query)
            return 0.01

    rig = Rig(1, 2, keep_layout, Predictor(), policy="survival", profile="-")
    rig.work(4)
    rig.settle()
    for rank in (0, 1) * 40:
        rig.world.decoded = m.Decoded(steps=10, seconds=0.13, requests=20, tokens=300)
        rig.world.report(rank)
        rig.deliver()
    rig.coordinator.handle_timer(DECISION_INTERVAL_SECONDS)
    snapshot = rig.world.decisions[-1][0]
    assert set(Predictor.asked) == {(1, 2.0, 30.0, 2)}
    assert (
        snapshot.factors[1].evaluate(2, 30) == pytest.approx(1.3, rel=0.02)
        and snapshot.doubts[1] == 0 < snapshot.doubts[2]
    )


def test_policies_are_shown_how_likely_drafts_are_right():
    """The last reports count most; a replica that says nothing of drafts does not count."""
    rig = Rig(1, 2, keep_layout, policy="survival", profile="-")
    rig.work(4)
    rig.settle()
    for rank, chances, seconds in ((0, [0.8, 0.4], 0.0), (1, [], 0.0), *[(1, [0.5, 0.1], 0.2)] * 40):
        rig.world.chances, rig.world.draft_seconds = chances, seconds
        rig.world.report(rank)
        rig.deliver()
    rig.coordinator.handle_timer(DECISION_INTERVAL_SECONDS)
    shown = rig.world.decisions[-1][0]
    assert (*shown.chances, shown.draft_seconds) == pytest.approx((0.5, 0.1, 0.2), abs=1e-3)


def test_switches_are_counted_while_the_engine_is_not_empty():
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.work(6)
    rig.settle()
    rig.finish(2)
    rig.settle()
    rig.world.report(0)
    rig.deliver()
    rig.coordinator.handle_timer(1.0)
    assert rig.world.decisions[-1][0].switches == 1
    rig.finish_all()
    rig.settle()
    rig.work(1)
    rig.coordinator.handle_timer(3.0)
    assert rig.world.decisions[-1][0].switches == 0


def test_threshold_merges_the_tail_and_returns_for_the_next_round():
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.work(6)
    rig.settle()
    assert not rig.world.records
    rig.finish(2)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2]
    for _ in range(2):
        rig.world.finish(0)
    rig.world.iterate(0)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2, 1]
    assert {record.reason for record in rig.world.records} == {"threshold"}


def test_the_peak_is_forgotten_when_the_engine_was_empty_during_a_control():
    """The next round's first requests must not look like the last round's tail."""
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.work(6)
    rig.settle()
    rig.control("flush")
    rig.finish(3)
    rig.settle()
    rig.work(1)
    for rank in (0, 1):
        rig.world.answer(rank, "flush")
    rig.settle()
    assert not rig.world.records


def test_a_third_round_of_the_same_size_is_decided_without_waiting():
    """Two requests might be the first of many; after two rounds of two they are not."""
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.rounds(2, requests=2)
    assert not rig.world.records
    rig.work(1, now=5.0)
    rig.settle()
    assert not rig.world.records
    rig.work(1, now=5.0)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2]


def test_one_that_predicts_is_asked_at_once_when_a_round_is_complete():
    rig = Rig(1, 2, keep_layout, policy="survival", profile="-")
    rig.rounds(2, requests=3)
    before = len(rig.world.decisions)
    for number in range(5):
        rig.work(1, now=10 + number * DECISION_INTERVAL_SECONDS / 10)
    asked = [(snapshot.requests, snapshot.complete) for snapshot, _ in rig.world.decisions[before:]]
    assert asked == [(1, False), (3, True)]


def up_front(snapshot, history) -> Decision:
    """Wants tp=2 for a round to come, and nothing else once it is there."""
    return Decision(tp=2 if len(snapshot.coming) else snapshot.degrees[0] if not snapshot.requests else snapshot.tp)


def known_rounds(requests: int = 3) -> Rig:
    """Two rounds of so many are over; the policy has seen all of them at once."""
    rig = Rig(1, 2, up_front, policy="survival", profile="-")
    for number in range(2):
        rig.work(requests, now=10.0 * number)
        rig.coordinator.handle_timer(10 * number + 2 * DECISION_INTERVAL_SECONDS)
        rig.settle()
        rig.finish_all()
    return rig


def test_a_round_starts_in_the_layout_that_is_best_for_all_of_it():
    rig = known_rounds()
    assert rig.coordinator.layout.tp == 1 and not rig.world.records
    before = len(rig.world.to_leaders)
    rig.work(2, now=50.0)
    assert {type(obj) for _, obj in rig.world.to_leaders[before:]} == {m.Prepare}, "the requests are held"
    snapshot, decision = rig.world.decisions[-1]
    assert (snapshot.requests, len(snapshot.load), decision.tp) == (1, 0, 2)
    assert snapshot.coming.output.tolist() == [0, 0, 0] and len(set(snapshot.coming.family)) == 3
    rig.settle()
    assert [(record.to_tp, record.requests) for record in rig.world.records] == [(2, 0)]
    assert [rank for rank, obj in rig.world.to_leaders if getattr(obj, "kind", "") == "work"][-2:] == [0, 0]
    assert rig.work(1, now=50.0) == [0] and not len(rig.world.decisions[-1][0].coming), "all are there"
    rig.settle()
    rig.finish_all()
    rig.coordinator.handle_timer(60.0)
    rig.settle()
    assert rig.coordinator.layout.tp == 1
    assert rig.world.decisions[-1][0].requests == 0


def test_it_is_asked_once_before_a_round_and_not_held_without_a_switch():
    rig = known_rounds()
    rig.coordinator._decisions.policy = keep_layout
    before = len(rig.world.decisions)
    assert rig.work(2, now=50.0) == [0, 1] and len(rig.world.decisions) == before + 1


def test_one_that_predicts_is_asked_less_often_in_the_course_of_a_long_round():
    rig = Rig(1, 2, keep_layout, policy="survival", profile="-")

    def asked(seconds: float, start: float) -> int:
        before = len(rig.world.decisions)
        for tick in range(int(seconds * 100)):
            rig.coordinator.handle_timer(start + tick / 100)
        return len(rig.world.decisions) - before

    rig.work(3, now=100.0)
    rig.settle()
    assert 85 <= asked(10, start=100) <= 101
    assert 18 <= asked(10, start=150) <= 20, "every 0.5 to 0.6 s"
    assert 10 <= asked(10, start=1000) <= 11, "every second"
    rig.work(1, now=1010.0)
    assert 85 <= asked(10, start=1010) <= 101, "more requests came"
    rig.settle()
    rig.finish_all()
    assert 85 <= asked(10, start=2000) <= 101, "an empty engine goes to base at once"


def test_requests_that_come_during_the_return_to_base_belong_to_the_next_round():
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.rounds(2, requests=2)
    rig.work(2, now=5.0)
    rig.settle()
    assert rig.coordinator.layout.tp == 2
    for _ in range(2):
        rig.world.finish(0)
    rig.world.iterate(0)
    for _ in range(2):
        rig.deliver()
        rig.iterate()
    assert rig.coordinator._switching.under_way.commanded and rig.work(1, now=9.0) == []
    rig.settle()
    last, _ = rig.world.decisions[-1]
    assert (rig.coordinator.layout.tp, last.requests, last.complete) == (1, 1, False)


def test_a_round_that_ends_during_a_switch():
    """The next one's requests wait for the switch, and are not taken for more of the last one's."""
    rig = make_rig_with_a_fast_leader()
    rig.work(1)
    rig.deliver(1)
    assert rig.world.decisions[-1][0].peak == 1 and not rig.world.decisions[-1][0].complete
    rig.work(1)
    assert rig.world.decisions[-1][0].complete


# -- health probes come at any time: they are no part of a round, and move nothing --------------------------------


def probe(rig: Rig, now: float) -> None:
    rig.serial += 1
    rig.coordinator.receive(Generation(obj=Request(rig.serial, "work"), tokens=1, counts=False), now)


def test_a_probe_moves_no_idle_engine():
    """Though the policy would start a round of the known size in another layout."""
    rig = known_rounds()
    probe(rig, 50.0)
    rig.coordinator.handle_timer(51.0)
    rig.settle()
    rig.finish_all()
    rig.coordinator.handle_timer(60.0)
    rig.settle()
    assert not rig.world.records
    rig.work(3, now=70.0)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2], "a round does"


@pytest.mark.parametrize("name", ["threshold", "survival"])
def test_nor_does_one_where_rounds_start_in_another_degree(name):
    """The last round had too little room for KV."""
    predictor, costs = machine(crossing())
    decide = make_policy(name, switch_at=1, predictor=predictor, costs=costs)
    rig = Rig(1, 4, decide, policy=name, switch_at=1, degrees=(1, 2, 4), profile="-")
    rig.work(64)
    rig.settle()
    rig.world.retracted = 10
    rig.finish_all()
    for now in range(10, 40, 10):
        probe(rig, now)
        rig.coordinator.handle_timer(now + 0.05)  # it has a single token to generate
        rig.settle()
        rig.finish_all()
        rig.coordinator.handle_timer(now + 5)
        rig.settle()
    assert not rig.world.records
    rig.work(64, now=50.0)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2], "a round does"


def test_threshold_does_not_merge_for_a_probe():
    """The policy merges for what is left once nothing has come for a second."""
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    probe(rig, 50.0)
    rig.settle()
    rig.coordinator.handle_timer(50.5)  # it has a single token to generate
    rig.settle()
    assert rig.world.preparing is None and not rig.world.records
    rig.finish_all()
    rig.work(1, now=70.0)
    rig.settle()
    rig.coordinator.handle_timer(80.0)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2], "for a request it does"


def test_a_probe_in_a_round_does_not_make_it_larger():
    rig = Rig(1, 2, keep_layout, policy="survival", profile="-")
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
        rig.coordinator.handle_timer(now + 50)
