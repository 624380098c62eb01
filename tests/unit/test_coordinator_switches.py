"""Switches of the coordinator that somebody asks for (all interleavings: test_coordinator_machine.py)."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.predict.cost import SwitchCost

from .coordinator_rig import Rig, make_rig_with_a_fast_leader
from .coordinator_world import Request

pytestmark = pytest.mark.unit


def test_reconfigure_and_its_record():
    rig = Rig(1, 2)
    rig.work(5)
    rig.settle()
    rig.reconfigure(2)
    rig.settle()
    (answer,) = rig.answers()
    (record,) = rig.world.records
    assert (answer.code, answer.message) == (200, "")
    assert answer.answer["epoch"] == record.epoch == 1
    assert (record.from_tp, record.to_tp, record.requests, record.reason) == (1, 2, 5, "request")
    assert record.phases == pytest.approx({"prepare": 1.5, "kv": 0.2, "check": 0.01})
    assert record.pause_seconds == pytest.approx(0.21)
    assert rig.coordinator._in_engine == 5


def test_work_goes_on_while_ranks_prepare():
    rig = Rig(1, 2)
    rig.reconfigure(2)
    assert rig.work(2) == [0, 1]


def test_grammars_of_the_other_group_are_compiled_before_the_switch():
    rig = Rig(1, 4)
    rig.world.grammatical = True
    rig.work(8)
    rig.reconfigure(2)
    rig.settle()
    sent = {rank: obj for rank, obj in rig.world.to_leaders if isinstance(obj, m.Compile)}
    # Two requests a rank; group 0 of tp 2 is of ranks 0 and 2.
    merged = rig.coordinator.config.layout(2)
    assert set(sent) == set(range(4))
    for rank, command in sent.items():
        (peer,) = set(merged.group(merged.group_of(rank))) - {rank}
        assert [(g.text, g.count) for g in command.grammars] == [("", 2), (str(peer), 2)]
    kinds = [type(obj).__name__ for rank, obj in rig.world.to_leaders if rank == 0]
    assert kinds[-3:] == ["Prepare", "Compile", "Switch"]
    assert rig.world.records[-1].phases["prepare"] == 0.5 + 3 + 1.0


def test_without_grammars_there_is_nothing_to_wait_for():
    rig = Rig(1, 2)
    rig.work(2)
    rig.world.grammatical = True
    for tp in (2, 1):
        rig.reconfigure(tp)
        rig.settle()
    kinds = [type(obj).__name__ for rank, obj in rig.world.to_leaders if rank == 0 and not isinstance(obj, Request)]
    assert kinds == ["Prepare", "Compile", "Switch", "Prepare", "Switch"]


@pytest.mark.parametrize(
    ("tps", "max_running", "room", "parked", "lost"),
    [
        ((1, 2), None, 22, 0, 0),  # two requests of ten tokens, and the next token of each
        ((1, 2), 2, 21, 0, 2),
        ((1, 2), 1, 21, 2, 0),
        ((1, 4), None, 40, 0, 4),
        ((2, 1), None, 11, 0, 0),
        ((2, 1), None, 9, 0, 8),
    ],
)
def test_what_a_switch_would_do(tps, max_running, room, parked, lost):
    """Eight requests on four ranks; half of a replica's decode, with ten tokens each."""
    rig = Rig(1, 4, max_running=max_running)
    rig.world.kv_totals = {1: 100, 2: 100, 4: 100, tps[1]: room}
    if tps[0] > 1:
        rig.reconfigure(tps[0])
        rig.settle()
    rig.work(8)
    for rank in range(4):
        rig.world.iterate(rank)
    rig.settle()
    before = len(rig.world.to_leaders)
    rig.coordinator.reconfigure(m.Reconfigure(query_id=5, tp=tps[1], dry_run=True), 0.0)
    reply = rig.answers()[-1]
    assert (reply.query_id, reply.code) == (5, 200)
    assert rig.coordinator.layout.tp == tps[0] and len(rig.world.to_leaders) == before, "nothing has happened"
    record = dict(reply.answer)
    del record["tokens"]
    assert record.pop("expected_seconds") is None
    assert record.pop("why") == "without a profile (--pat-profile) times cannot be predicted"
    expected = {"from_tp": tps[0], "to_tp": tps[1], "requests": 8, "parked": parked, "recomputed_tokens": lost}
    assert record == expected


def test_a_dry_run_with_a_profile_says_how_long_a_switch_would_take():
    class Costs:
        def estimate(self, from_tp, to_tp, lengths):
            return SwitchCost(seconds=from_tp + 10 * to_tp + sum(lengths), state_seconds=0.0, recompute_below=0)

    rig = Rig(1, 4, costs=Costs())
    rig.work(2)
    rig.settle()
    rig.coordinator.reconfigure(m.Reconfigure(query_id=5, tp=2, dry_run=True), 0.0)
    assert rig.answers()[-1].answer["expected_seconds"] == 1 + 20 + 2 * 10 and "why" not in rig.answers()[-1].answer


def test_lost_requests_end_the_engine():
    rig = Rig(1, 2)
    rig.work(2)
    rig.reconfigure(2)
    rig.iterate()
    rig.deliver()
    rig.iterate()
    switched = rig.world.ranks[0].outbox[0]
    assert isinstance(switched, m.RankSwitched) and switched.requests_out == 2
    rig.world.ranks[0].outbox[0] = m.RankSwitched(
        rank=0, epoch=switched.epoch, phases={}, requests_in=1, requests_out=1
    )
    with pytest.raises(RuntimeError, match="requests were lost in switch 1: 2 in, 1 out"):
        rig.deliver()


def test_the_first_report_of_a_fast_leader_is_not_lost():
    rig = make_rig_with_a_fast_leader()
    assert rig.coordinator.layout.tp == 1
    rig.deliver(1)
    assert rig.coordinator.layout.tp == 2
    assert rig.coordinator._in_engine == 0


def test_messages_of_another_switch_are_ignored():
    rig = Rig(1, 2)
    late = [m.Prepared(rank=rank, epoch=9, seconds=0.0, error="late") for rank in (0, 1)]
    late += [m.RankSwitched(rank=rank, epoch=9, phases={}) for rank in (0, 1)]
    for message in late:
        rig.coordinator.handle_rank_message(message, 0.0)
    rig.reconfigure(2)
    for message in late:
        rig.coordinator.handle_rank_message(message, 0.0)
    rig.settle()
    assert [a.code for a in rig.answers()] == [200]
