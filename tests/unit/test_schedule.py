"""Schedules: what they say, and that replicas hold exactly where they say so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator import decision_log
from sglang_pat.coordinator.schedule import check_degrees, parse, read
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import Go, Reconfigure, ScheduleEntry
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Load, Snapshot
from sglang_pat.switch.gate import StepGate

from .drawn import examples
from .schedule_world import Request, World

BASE = ParallelLayout(1, 4)


# -- files ----------------------------------------------------------------------------------------------------


def test_a_list_and_lines_are_the_same():
    entries = [{"tp": 2, "arrived": 4, "step": 10}, {"tp": 1, "left": 3}, {"tokens": 900, "hold": True}]
    wanted = [ScheduleEntry(**entry) for entry in entries]
    assert parse(json.dumps(entries)) == wanted
    assert parse("\n".join(json.dumps(entry) for entry in entries) + "\n\n") == wanted
    assert parse("[]") == parse("") == []


BAD = {
    "two points": ('[{"tp": 2, "step": 1, "left": 2}]', "step and left in one entry: give one of step, batch"),
    "negative": ('[{"tp": 2, "step": -1}]', "entry 1: step is -1, must be at least 0"),
    "tp 0": ('[{"step": 1}, {"tp": 0}]', "entry 2: tp is 0, must be at least 1"),
    "float": ('[{"tp": 2.5}]', "entry 1: Expected `int | null`, got `float`"),
    "unknown": ('[{"tp": 2, "at": 3}]', "unknown field `at`"),
    "not JSON": ("tp 2 at 40", "line 1 is not JSON"),
    "second line": ('{"tp": 2}\n{', "line 2 is not JSON"),
    "not a list": ("3", "entry 1: Expected `object`, got `int`"),
    "hold in the middle": ('[{"hold": true}, {"tp": 2}]', "hold: only the last entry may have it"),
    "deep": ("[" * 100_000, "is not JSON"),
    "not utf-8": (b"\xff\xfe", "line 1 is not JSON"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_schedules_get_one_line(kind, tmp_path):
    text, says = BAD[kind]
    with pytest.raises(ValueError) as error:
        parse(text)
    assert says in str(error.value) and "\n" not in str(error.value)
    path = tmp_path / "schedule"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="--pat-schedule"):
        read(str(path))


def test_a_missing_file_and_an_impossible_degree_get_one_line():
    with pytest.raises(ValueError, match="--pat-schedule /nowhere: No such file"):
        read("/nowhere")
    layouts = AdaptiveConfig(base=BASE).layouts
    with pytest.raises(ValueError, match=r"entry 2: tp=3 is not a candidate; choose one of \[1, 2, 4\]"):
        check_degrees(parse('[{"tp": 2}, {"tp": 3}]'), layouts)
    check_degrees(parse('[{"tp": 4}, {"step": 3}]'), layouts)
    with pytest.raises(ValueError, match="--pat-schedule x needs --pat-policy schedule, not manual"):
        AdaptiveConfig(base=BASE, policy="manual", schedule="x")


def test_a_decision_log_is_a_schedule():
    def decision(tp, to, outputs, requests=None):
        load = Load(**{f: outputs for f in ("prompt", "output", "limit", "family", "replica")})
        requests = len(outputs) if requests is None else requests
        snapshot = Snapshot(now=1.0, tp=tp, degrees=(1, 2), num_ranks=2, requests=requests, peak=9, last_arrival=0.0)
        snapshot = type(snapshot)(**{**snapshot.__dict__, "load": load})
        return decision_log.dump_decision(snapshot, Decision(tp=to))

    events = [
        decision_log.dump_start("survival", switch_at=8, history=LengthHistory()),
        decision(1, 1, np.array([5, 6])),
        decision_log.dump_length(40, 1, True),
        decision(1, 2, np.array([50, 60])),
        decision(1, 2, np.array([51, 61])),  # taken again, as the first switch was aborted
        decision_log.dump_length(70, 1, True),
        decision(2, 1, np.array([], dtype=np.int64)),
        decision(1, 2, np.array([], dtype=np.int64), requests=3),
    ]
    text = "\n".join(json.dumps(event) for event in events)
    assert parse(text) == [
        ScheduleEntry(tp=2, tokens=40 + 110),
        ScheduleEntry(tp=1, left=0),
        ScheduleEntry(tp=2, left=3),
    ]


# -- the gate -------------------------------------------------------------------------------------------------


def test_a_gate_closes_at_its_point_and_is_open_without_one():
    gate = StepGate()
    for _ in range(5):
        gate.launched(decode=True)
        gate.finished()
    assert not gate.closed and gate.free
    gate.go(Go(number=3, steps=2))
    gate.launched(decode=False)
    gate.launched(decode=True)
    assert not gate.closed
    gate.launched(decode=True)
    assert gate.closed and not gate.said
    held = gate.held(rank=1)
    assert (held.rank, held.number, held.steps, held.batches) == (1, 3, 2, 3) and gate.said
    gate.go(Go(number=4, batches=1))
    assert not gate.closed and not gate.said
    gate.launched(decode=False)
    assert gate.closed
    gate.go(Go(number=5, finish=True))
    gate.launched(decode=True)
    assert not gate.closed
    gate.finished()
    assert gate.closed
    gate.go(Go(number=6, steps=0))
    assert gate.closed and not gate.said


def test_a_gate_stays_closed_over_a_switch_unless_it_is_free():
    gate = StepGate()
    assert gate.leave(rank=0) is None and not gate.closed
    gate.go(Go(number=1, steps=5))
    gate.launched(decode=True)
    left = gate.leave(rank=0)
    assert (left.number, left.steps) == (1, 1), "what has not been reported"
    assert gate.closed and not gate.said
    gate.go(Go(number=2, steps=1))
    gate.launched(decode=True)
    gate.held(rank=0)
    assert gate.leave(rank=0) is None and gate.closed and not gate.said


# -- carried out ----------------------------------------------------------------------------------------------


def requests(count: int, length: int = 100, prefills: int = 1) -> list[Request]:
    return [Request(length + i, prefills) for i in range(count)]


def started(entries: list[dict], seed: int = 0, base: ParallelLayout = BASE) -> World:
    world = World(base, seed)
    world.set(entries)
    return world


@pytest.mark.parametrize("seed", range(5))
def test_every_replica_has_made_exactly_so_many_steps(seed):
    world = started([{"tp": 2, "arrived": 8, "step": 20}, {"tp": 4, "step": 33}, {"tp": 1, "step": 33}], seed)
    query = world.wait()
    world.send(*requests(3))
    world.run()
    assert not world.fired and query not in world.answers, "not before eight have arrived"
    world.send(*requests(5))
    world.run()
    assert [fired.steps for fired in world.fired] == [dict.fromkeys(range(4), 20), {0: 33, 1: 33}, {0: 33}]
    assert [fired.alive for fired in world.fired] == [8, 8, 8]
    state = world.answers[query].state
    assert (state.entries, state.done, state.holding) == (3, 3, False)
    assert [(s.from_tp, s.to_tp, s.reason, s.requests) for s in state.switches] == [
        (1, 2, "schedule", 8), (2, 4, "schedule", 8), (4, 1, "schedule", 8),
    ]  # fmt: skip
    assert not any(rank.requests for rank in world.ranks), "then it goes on to the end"


@pytest.mark.parametrize("seed", range(5))
def test_tokens_and_requests_left(seed):
    world = started([{"tp": 2, "arrived": 8, "tokens": 300}, {"tp": 4, "left": 3}, {"tp": 1, "left": 0}], seed)
    world.send(*requests(8, 50))
    world.run()
    first, second, third = world.fired
    assert 300 <= first.generated < 308 and first.alive == 8
    assert 0 <= 3 - second.alive < 2, "a group at most goes beyond it"
    assert third.alive == 0 and world.layout == BASE


@pytest.mark.parametrize("seed", range(5))
def test_tokens_count_from_where_the_schedule_takes_hold(seed):
    """Also where it is set in the instant after a switch, when the new leaders have not listed their requests yet."""
    world = started([{"tp": 2, "arrived": 8, "tokens": 100}], seed)
    world.send(*requests(8, 50))
    world.run(until=lambda world: world.fired)
    world.set([{"tp": 4, "tokens": 100}])
    world.run()
    first, second = world.fired
    # What the replicas do before they hold again does not count.
    assert 100 <= second.generated - first.generated < 200 and second.alive == 8


def test_batches_count_prefills():
    world = started([{"tp": 2, "arrived": 4, "batch": 2}])
    world.send(*requests(4, prefills=3))
    world.run()
    assert world.fired[0].batches == dict.fromkeys(range(4), 2)
    assert world.fired[0].steps == dict.fromkeys(range(4), 0)


def test_held_until_there_is_another_schedule():
    world = started([{"tp": 2, "arrived": 2, "step": 5}, {"step": 9, "hold": True}])
    query = world.wait()
    world.send(*requests(2))
    world.run()
    assert world.answers[query].state.holding
    assert {world.ranks[rank].steps for rank in world.layout.leaders} == {9}
    world.set([{"step": 4, "hold": True}])  # counted from now on
    world.run()
    assert {world.ranks[rank].steps for rank in world.layout.leaders} == {13}
    world.set([])
    world.run()
    assert not any(rank.requests for rank in world.ranks)


def test_a_schedule_that_is_replaced_answers_who_waits():
    world = started([{"tp": 2, "arrived": 100}])
    query = world.wait()
    world.run()
    world.set([])
    assert world.answers[query].state.done == 0
    world.send(*requests(3))
    world.run()
    assert not world.fired and not any(rank.requests for rank in world.ranks)


@pytest.mark.parametrize("entries", [[], [{"tp": 4, "step": 3}, {"tp": 1, "step": 9}]])
@pytest.mark.parametrize("seed", range(10))
def test_a_schedule_that_is_replaced_during_its_switch(entries, seed):
    """The switch is carried through, and counts for the schedule that wanted it, not for the new one."""
    world = started([{"tp": 2, "arrived": 4, "step": 5}], seed)
    world.send(*requests(4))
    world.run(until=lambda w: w.coordinator._switching.under_way or w.coordinator._wanted)
    world.set(entries)
    query = world.wait()
    world.run()
    assert world.answers[query].state.done == len(entries) == len(world.answers[query].state.switches)
    assert [record.to_tp for record in world.coordinator._records] == [2, *(entry["tp"] for entry in entries)]
    assert not any(rank.requests for rank in world.ranks)


def test_an_entry_of_the_layout_in_force_switches_nothing():
    world = started([{"tp": 1, "arrived": 1, "step": 3}, {"tp": 2, "step": 3}])
    world.send(*requests(2))
    world.run()
    assert [fired.alive for fired in world.fired] == [2]


def test_a_request_to_switch_comes_in_between():
    """The replicas that the request merges in the middle of their way hold, and then go on to the entry's step."""
    world = started([{"tp": 4, "arrived": 4, "step": 50}])
    world.send(*requests(4))
    world.run(until=lambda w: w.ranks[0].steps == 20)
    world.coordinator.reconfigure(Reconfigure(query_id=999, tp=2), 0.0)
    world.run()
    first, second = world.fired
    assert any(steps < 50 for steps in first.steps.values())
    assert second.steps == {0: 50, 1: 50} and second.alive == 4 and world.layout.tp == 4
    assert not any(rank.requests for rank in world.ranks)


def test_another_policy_says_so():
    world = World(BASE, 0, policy="manual")
    world.set([{"tp": 2}])
    (answer,) = world.answers.values()
    assert answer.state is None


ENTRIES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"tp": st.sampled_from((1, 2, 4)), point: st.integers(0, 60)})
        for point in ("step", "batch", "tokens", "left")
    ),
    max_size=6,
)


@examples(200)
@given(
    entries=ENTRIES,
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_loses_nothing_and_ends(entries, lengths, seed):
    """Whatever is never due stays so; without a schedule everything ends."""
    world = started(entries, seed)
    world.send(*(Request(length, prefills) for length, prefills in lengths))
    world.run()
    world.set([])
    world.run()
    assert sum(rank.generated for rank in world.ranks) == sum(length for length, _ in lengths)
    assert not any(rank.requests for rank in world.ranks)
