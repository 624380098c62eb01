"""The coordinator in single situations (all interleavings: test_coordinator_machine.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.core import BASE_ATTEMPTS, DECISION_INTERVAL_SECONDS, HISTORY, Coordinator
from sglang_pat.coordinator.decision_log import dump_decision, load_decision
from sglang_pat.coordinator.leader import Work
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import stay
from sglang_pat.policies.rules import SETTLE_SECONDS
from sglang_pat.policies.snapshot import Decision
from sglang_pat.policies.threshold import threshold

from .coordinator_world import FlushReply, Merged, Request, World, control, deliver

pytestmark = pytest.mark.unit


class Rig:
    """A coordinator with its world, and shorthands."""

    def __init__(self, tp: int = 1, dp: int = 2, decide=None, **options: Any) -> None:
        self.config = AdaptiveConfig(base=ParallelLayout(tp, dp), **dict(policy="manual") | options)
        self.world = World(self.config)
        self.coordinator = Coordinator(self.config, self.world, decide)
        self.serial = 0

    def work(self, count: int = 1, tokens: int = 1, now: float = 0.0) -> list[int]:
        """Returns the leaders that got the requests."""
        before = len(self.world.to_leaders)
        for _ in range(count):
            self.serial += 1
            self.coordinator.receive(Work(obj=Request(self.serial, "work"), tokens=tokens), now)
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

    def finish_all(self) -> None:
        for rank in range(self.config.num_ranks):
            while self.world.ranks[rank].requests:
                self.world.finish(rank)
            self.world.iterate(rank)
        self.settle()

    def reconfigure(self, tp: int, query_id: int = 0) -> None:
        self.coordinator.reconfigure(m.Reconfigure(query_id=query_id, tp=tp), 0.0)

    def answers(self) -> list[m.ReconfigureReply]:
        return [obj for obj in self.world.server if isinstance(obj, m.ReconfigureReply)]


def test_work_goes_to_the_least_loaded():
    rig = Rig(1, 4)
    assert rig.work(8) == [0, 1, 2, 3, 0, 1, 2, 3]
    rig.settle()
    rig.world.finish(2)
    rig.world.iterate(2)
    rig.deliver()
    assert rig.work(1) == [2]


def test_tokens_decide_between_equal_numbers():
    rig = Rig(1, 2)
    assert rig.work(1, tokens=500) + rig.work(1, tokens=3) == [0, 1]
    assert rig.work(1, tokens=3) + rig.work(1, tokens=3) == [1, 0]


def test_policies_see_requests_that_no_leader_has_taken_yet():
    """A long prefill keeps them in the socket; a batch that is half visible looks like a small one."""
    rig = Rig(1, 2, stay, policy="survival", profile="-")
    rig.work(3, tokens=7)
    rig.coordinator.tick(DECISION_INTERVAL_SECONDS)
    load = rig.world.decisions[-1][0].load
    assert load.prompt.tolist() == [7, 7, 7] and load.replica.tolist() == [0, 0, 1] and len(set(load.family)) == 3
    rig.settle()
    rig.coordinator.tick(2 * DECISION_INTERVAL_SECONDS)
    load = rig.world.decisions[-1][0].load
    assert load.prompt.tolist() == [4, 4, 4] and load.output.tolist() == [6, 6, 6], "as the leaders report them"


def test_replies_of_a_fast_and_a_slow_leader():
    """Leader 0 answers both requests before leader 1 answers the first."""
    rig = Rig(1, 2)
    first, second = rig.control("flush"), rig.control("flush")
    rig.iterate()
    for rank in (0, 0, 1, 1):
        rig.world.answer(rank, "flush")
        rig.deliver(rank)
    assert rig.world.server == [Merged(first, (0, 1)), Merged(second, (0, 1))]


def test_replies_are_merged_in_the_order_of_ranks():
    rig = Rig(1, 4)
    serial = rig.control("update")
    rig.iterate()
    for rank in (3, 1, 0, 2):
        assert rig.world.server == []
        rig.world.answer(rank, "update")
        rig.deliver(rank)
    assert rig.world.server == [Merged(serial, (0, 1, 2, 3))]


def test_a_reply_nobody_asked_for_passes():
    rig = Rig(1, 2)
    extra = FlushReply(0, -1)
    rig.coordinator.reply(0, extra, 0.0)
    assert rig.world.server == [extra]
    rig.control("flush")
    rig.iterate()
    rig.world.answer(0, "flush")
    rig.deliver(0)
    rig.coordinator.reply(0, extra, 0.0)
    assert rig.world.server == [extra, extra]


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
    assert rig.coordinator._requests() == 5


@pytest.mark.parametrize("tp", [0, 3, 4, -1])
def test_reconfigure_to_what_cannot_be(tp):
    rig = Rig(1, 2)
    rig.reconfigure(tp)
    assert [(a.code, a.message) for a in rig.answers()] == [(400, f"tp={tp} is not a candidate; choose one of [1, 2]")]


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


def test_needs_base_in_a_tail_layout_keeps_the_order():
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.settle()
    before = len(rig.world.to_leaders)
    update = rig.control("update", needs_base=True)
    assert rig.work(1) == [], "what came later waits"
    rig.settle()
    for rank in (0, 1):
        rig.world.answer(rank, "update")
    rig.settle()
    sent = [obj.kind for _, obj in rig.world.to_leaders[before:] if isinstance(obj, Request)]
    assert sent == ["update", "update", "work"]
    assert Merged(update, (0, 1)) in rig.world.server
    assert rig.world.records[-1].reason == "control"


def test_needs_base_waits_for_a_switch_that_is_being_prepared():
    """Ranks have looked at the weights already: these must not change under them."""
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.control("update", needs_base=True)
    rig.settle()
    kinds = [type(obj).__name__ for rank, obj in rig.world.to_leaders if rank == 0]
    assert kinds == ["Prepare", "Switch", "Prepare", "Switch", "Request"]


def test_policies_wait_for_controls():
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.work(6)
    rig.settle()
    rig.control("flush")
    for _ in range(2):
        rig.world.finish(0), rig.world.finish(1)
    rig.world.iterate(0), rig.world.iterate(1)
    rig.settle()
    assert rig.world.preparing is None
    rig.world.answer(0, "flush"), rig.world.answer(1, "flush")
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2]


def test_policies_do_not_act_while_generation_is_paused():
    """Each bucket of a weight update would send the engine to the base layout and back."""
    rig = Rig(1, 2, policy="threshold", switch_at=4)
    rig.work(6)
    rig.control("pause", pauses=True)
    rig.settle()
    rig.world.finish(0), rig.world.finish(1)
    rig.world.iterate(0), rig.world.iterate(1)
    for _ in range(3):
        rig.control("update", needs_base=True)
        rig.settle()
        rig.world.answer(0, "update"), rig.world.answer(1, "update")
        rig.settle()
    assert rig.world.records == []
    rig.control("continue", pauses=False)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2]


def test_no_switch_without_memory():
    rig = Rig(1, 2)
    rig.control("release", releases=frozenset({"weights", "kv_cache"}))
    rig.control("resume", resumes=frozenset({"weights"}))
    rig.settle()
    rig.reconfigure(2)
    assert [(a.code, a.message) for a in rig.answers()] == [(409, "memory is released (kv_cache); resume it first")]
    rig.control("resume", resumes=frozenset({"weights", "kv_cache"}))
    rig.reconfigure(2)
    rig.settle()
    assert rig.answers()[-1].code == 200 and rig.coordinator.layout.tp == 2


def test_needs_base_gives_up_after_some_attempts():
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.settle()
    rig.world.aborts = float("-inf")  # this world aborts every time
    rig.control("update", needs_base=True)
    with pytest.raises(RuntimeError, match="cannot return to the base layout for a control request: rank 0: no"):
        for _ in range(10):
            rig.settle("abort")
    assert sum(bool(record.error) for record in rig.world.records) == BASE_ATTEMPTS


def test_attempts_are_counted_anew_after_a_success():
    rig = Rig(1, 2)
    for _ in range(3):
        rig.reconfigure(2)
        rig.settle()
        rig.control("update", needs_base=True)
        rig.settle("abort")  # this world makes the last attempt succeed
        for rank in (0, 1):
            rig.world.answer(rank, "update")
        rig.settle()
        assert rig.coordinator.layout.tp == 1
    errors = [bool(record.error) for record in rig.world.records]
    assert errors == [False, True, True, False] * 3


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


def with_a_fast_leader():
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


def test_the_first_report_of_a_fast_leader_is_not_lost():
    rig = with_a_fast_leader()
    assert rig.coordinator.layout.tp == 1
    rig.deliver(1)
    assert rig.coordinator.layout.tp == 2
    assert rig.coordinator._requests() == 0


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


def test_threshold_merges_the_tail_and_returns_for_the_next_round():
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.work(6)
    rig.settle()
    assert not rig.world.records
    for _ in range(2):
        rig.world.finish(0), rig.world.finish(1)
    rig.world.iterate(0), rig.world.iterate(1)
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
    for _ in range(3):
        rig.world.finish(0), rig.world.finish(1)
    rig.world.iterate(0), rig.world.iterate(1)
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


def test_its_decision_log_gives_the_same_decision():
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.rounds(2, requests=2)
    rig.work(2, now=5.0)
    decide, switches = threshold(2), 0
    for snapshot, decision in rig.world.decisions:
        found, logged = load_decision(json.loads(json.dumps(dump_decision(snapshot, decision))))
        assert decide(found, LengthHistory()) == logged == decision
        if decision.tp > snapshot.tp:
            switches += 1
            assert decide(replace(found, complete=False), LengthHistory()).tp == snapshot.tp
    assert switches == 1


def test_one_that_predicts_is_asked_at_once_when_a_round_is_complete():
    rig = Rig(1, 2, stay, policy="survival", profile="-")
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
        rig.coordinator.tick(10 * number + 2 * DECISION_INTERVAL_SECONDS)
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
    rig.coordinator.tick(60.0)
    rig.settle()
    assert rig.coordinator.layout.tp == 1
    assert rig.world.decisions[-1][0].requests == 0


@pytest.mark.parametrize("fate", ["prepare", "abort"])
def test_and_in_the_old_one_if_that_fails(fate):
    rig = known_rounds()
    rig.work(2, now=50.0)
    rig.settle(fate)
    assert rig.world.records[0].error and rig.coordinator._requests() == 2


def test_it_is_asked_once_before_a_round_and_not_held_without_a_switch():
    rig = known_rounds()
    rig.coordinator._policy = stay
    before = len(rig.world.decisions)
    assert rig.work(2, now=50.0) == [0, 1] and len(rig.world.decisions) == before + 1


def test_a_round_of_which_nothing_more_comes():
    """Four came the last times; what came now is looked at as it is after a while."""
    rig = known_rounds(4)
    rig.coordinator._policy = stay
    rig.work(2, now=50.0)
    rig.settle()
    rig.coordinator.tick(50.0 + 0.9 * SETTLE_SECONDS)
    assert len(rig.world.decisions[-1][0].coming) == 4
    rig.coordinator.tick(50.0 + 1.1 * SETTLE_SECONDS)
    assert len(rig.world.decisions[-1][0].coming) == 0


def test_one_that_predicts_is_asked_less_often_in_the_course_of_a_long_round():
    rig = Rig(1, 2, stay, policy="survival", profile="-")

    def asked(seconds: float, start: float) -> int:
        before = len(rig.world.decisions)
        for tick in range(int(seconds * 100)):
            rig.coordinator.tick(start + tick / 100)
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
    assert rig.coordinator._switching.commanded and rig.work(1, now=9.0) == []
    rig.settle()
    last, _ = rig.world.decisions[-1]
    assert (rig.coordinator.layout.tp, last.requests, last.complete) == (1, 1, False)


def test_a_round_that_ends_during_a_switch():
    """The next one's requests wait for the switch, and are not taken for more of the last one's."""
    rig = with_a_fast_leader()
    rig.work(1)
    rig.deliver(1)
    assert rig.world.decisions[-1][0].peak == 1 and not rig.world.decisions[-1][0].complete
    rig.work(1)
    assert rig.world.decisions[-1][0].complete


def test_history_is_bounded():
    rig = Rig(1, 2)
    for i in range(HISTORY + 2):
        rig.reconfigure(2 - i % 2, query_id=i)
        rig.settle()
    rig.coordinator.status(m.StatusQuery(query_id=1))
    status = rig.world.server[-1].status
    assert len(status["switches"]) == HISTORY
    assert status["num_switches"] == HISTORY + 2
    assert status["switches"][-1]["epoch"] == HISTORY + 2


# -- the planner's floor -------------------------------------------------------------------------------------


def test_a_round_waits_for_its_floor():
    rig = Rig(1, 4, policy="manual")
    rig.settle()
    rig.coordinator.floor(m.Floor(tp=2), 0.0)
    assert rig.work(3) == [], "they wait for the switch"
    rig.settle()
    assert (rig.world.known.tp, rig.world.records[-1].reason) == (2, "planner")
    assert len(rig.world.ranks[0].requests) + len(rig.world.ranks[1].requests) == 3
    rig.finish_all()
    assert rig.world.known.tp == 2, "until the round is over"
    rig.coordinator.floor(m.Floor(tp=0), 0.0)
    rig.settle()
    assert rig.world.known.tp == 1


def test_policies_choose_from_the_floor_up():
    seen = []

    def highest(snapshot, history):
        seen.append(snapshot.degrees)
        return Decision(tp=snapshot.degrees[-1] if snapshot.requests else snapshot.degrees[0])

    rig = Rig(1, 4, decide=highest, policy="manual")
    rig.coordinator.floor(m.Floor(tp=2), 0.0)
    rig.settle()
    assert rig.world.known.tp == 2
    rig.work(2)
    rig.settle()
    assert rig.world.known.tp == 4
    rig.finish_all()
    rig.settle()
    assert rig.world.known.tp == 2
    assert (2, 4) in seen and seen[-1] == (2, 4)


def test_a_switch_to_the_floor_that_fails_is_not_repeated_at_once():
    rig = Rig(1, 2, policy="manual")
    rig.settle()
    rig.coordinator.floor(m.Floor(tp=2), 0.0)
    rig.work(1)
    rig.settle("abort")
    assert [record.error for record in rig.world.records] == ["rank 0: no"]
    assert sum(len(rank.requests) for rank in rig.world.ranks) == 1
