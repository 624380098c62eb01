"""Switches of the coordinator that somebody asks for (all interleavings: test_coordinator_machine.py)."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.figures import RECORDS
from sglang_pat.layout import ParallelLayout

from .coordinator_rig import Rig, with_a_fast_leader
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
    assert answer.record["epoch"] == record.epoch == 1
    assert (record.from_tp, record.to_tp, record.requests, record.reason) == (1, 2, 5, "request")
    assert record.phases == pytest.approx({"prepare": 1.5, "kv": 0.2, "check": 0.01})
    assert record.pause_seconds == pytest.approx(0.21)
    assert rig.coordinator._in_engine == 5


@pytest.mark.parametrize("tp", [0, 3, 4, -1])
def test_reconfigure_to_what_cannot_be(tp):
    rig = Rig(1, 2)
    rig.reconfigure(tp)
    assert [(a.code, a.message) for a in rig.answers()] == [
        (400, f"tp={tp} is not a candidate; choose one of [1, 2] (--pat-candidates)")
    ]


def test_reconfigure_while_busy_and_to_where_we_are():
    rig = Rig(1, 2)
    rig.reconfigure(1, query_id=1)
    rig.reconfigure(2, query_id=2)
    rig.reconfigure(1, query_id=3)
    rig.settle()
    assert {a.query_id: a.code for a in rig.answers()} == {1: 200, 3: 409, 2: 200}
    assert "already in tp1×dp2" in rig.answers()[0].message


@pytest.mark.parametrize("fate", ["prepare", "abort"])
def test_aborted_switch_goes_on_in_the_old_layout(fate):
    rig = Rig(1, 2)
    rig.work(3)
    rig.reconfigure(2)
    rig.settle(fate)
    (answer,) = rig.answers()
    assert answer.code == 500 and "rank 0: no" in answer.message
    assert rig.coordinator.layout == rig.world.layout == ParallelLayout(1, 2)
    assert rig.work(2) == [1, 0]
    rig.reconfigure(2, query_id=1)
    rig.settle()
    assert rig.answers()[1].code == 200


def test_requests_wait_for_the_new_leaders():
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.iterate()
    rig.deliver()  # all prepared: the switch is commanded
    assert rig.work(3) == []
    rig.settle()
    assert [rank for rank, obj in rig.world.to_leaders if getattr(obj, "kind", "") == "work"] == [0, 0, 0]


def test_work_goes_on_while_ranks_prepare():
    rig = Rig(1, 2)
    rig.reconfigure(2)
    assert rig.work(2) == [0, 1]


def test_a_switch_waits_for_the_last_reply():
    rig = Rig(1, 2)
    rig.control("flush")
    rig.reconfigure(2)
    rig.settle()
    assert not rig.world.records and rig.world.commanded is None
    for rank in (0, 1):
        rig.world.answer(rank, "flush")
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2]


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


@pytest.mark.parametrize("max_running,parked", [(None, 0), (2, 0), (1, 2)])
def test_what_a_switch_would_do(max_running, parked):
    """Eight requests, of which one decodes on each of four replicas; then two would, on two."""
    rig = Rig(1, 4, max_running=max_running)
    rig.work(8)
    for rank in range(4):
        rig.world.iterate(rank)
    rig.settle()
    before = len(rig.world.to_leaders)
    rig.coordinator.reconfigure(m.Reconfigure(query_id=5, tp=2, dry_run=True), 0.0)
    reply = next(obj for obj in rig.world.server if isinstance(obj, m.ReconfigureReply) and obj.query_id == 5)
    assert reply.code == 200 and rig.coordinator.layout.tp == 1 and len(rig.world.to_leaders) == before
    assert {name: reply.record[name] for name in ("from_tp", "to_tp", "requests", "parked")} == {
        "from_tp": 1, "to_tp": 2, "requests": 8, "parked": parked,
    }  # fmt: skip


@pytest.mark.parametrize(
    "tps,max_running,room,lost",
    [
        ((1, 2), None, 22, 0),  # two requests of ten tokens, and the next token of each
        ((1, 2), None, 21, 2),
        ((1, 2), 1, 21, 0),
        ((1, 4), None, 40, 4),
        ((2, 1), None, 11, 0),
        ((2, 1), None, 9, 8),
    ],
)
def test_a_switch_for_which_there_is_no_room(tps, max_running, room, lost):
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
    rig.coordinator.reconfigure(m.Reconfigure(query_id=5, tp=tps[1], dry_run=True), 0.0)
    reply = next(obj for obj in rig.world.server if isinstance(obj, m.ReconfigureReply) and obj.query_id == 5)
    assert reply.record["recomputed_tokens"] == lost


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
        rank=0, epoch=switched.epoch, tp=2, phases={}, requests_in=1, requests_out=1
    )
    with pytest.raises(RuntimeError, match="requests were lost in switch 1: 2 in, 1 out"):
        rig.deliver()


def test_the_first_report_of_a_fast_leader_is_not_lost():
    rig = with_a_fast_leader()
    assert rig.coordinator.layout.tp == 1
    rig.deliver(1)
    assert rig.coordinator.layout.tp == 2
    assert rig.coordinator._in_engine == 0


def test_messages_of_another_switch_are_ignored():
    rig = Rig(1, 2)
    late = [m.Prepared(rank=rank, epoch=9, seconds=0.0, error="late") for rank in (0, 1)]
    late += [m.RankSwitched(rank=rank, epoch=9, tp=2, phases={}) for rank in (0, 1)]
    for message in late:
        rig.coordinator.rank_message(message, 0.0)
    rig.reconfigure(2)
    for message in late:
        rig.coordinator.rank_message(message, 0.0)
    rig.settle()
    assert [a.code for a in rig.answers()] == [200]


def test_history_is_bounded():
    rig = Rig(1, 2)
    for i in range(RECORDS + 2):
        rig.reconfigure(2 - i % 2, query_id=i)
        rig.settle()
    rig.coordinator.status(m.StatusQuery(query_id=1))
    status = rig.world.server[-1].status
    assert len(status["switches"]) == RECORDS
    assert status["num_switches"] == RECORDS + 2
    assert status["switches"][-1]["epoch"] == RECORDS + 2
