"""Schedules carried out: replicas hold exactly where they say so."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.coordinator.leader import Generation
from sglang_pat.coordinator.schedule import Schedule, check, parse
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import Held, Reconfigure
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Snapshot

from .drawn import examples
from .schedule_world import BASE, Request, World


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


def test_replicas_work_on_until_so_many_have_come():
    world = started([{"tp": 2, "came": 3}, {"tp": 4, "came": 3, "left": 0}])
    world.send(*requests(2, 10))
    world.run()
    assert not world.fired and not any(rank.requests for rank in world.ranks), "they are not held"
    world.send(*requests(1, 10))
    world.run()
    assert [(fired.alive, fired.generated) for fired in world.fired] == [(1, 21), (0, 31)]


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
    assert [record.to_tp for record in world.coordinator.account.records] == [2, *(entry["tp"] for entry in entries)]
    assert not any(rank.requests for rank in world.ranks)


def test_the_last_requests_of_a_falling_schedule_end_in_one_step():
    """Then both entries are of this round: it has come down past both."""
    schedule = Schedule(
        check([{"tp": 4, "left": 3}, {"tp": 1, "left": 0}, {"tp": 2, "left": 0}]), [0], itertools.count()
    )
    hold = schedule.begin()[0]
    schedule.held(Held(rank=0, number=hold.number, steps=1, batches=1))
    for _ in range(4):
        schedule.arrived(Generation(obj=None, tokens=1))
    go = schedule.look({0: 4}, lambda: 0)[0][0]
    schedule.held(Held(rank=0, number=go.number, steps=1, batches=1))
    for tp in (4, 1):
        _, due = schedule.look({0: 0}, lambda: 0)
        assert due is not None and due.tp == tp
        schedule.carried_out(None)
    assert schedule.look({0: 0}, lambda: 0)[1] is None, "two that are equal mean two rounds"


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


def test_under_another_policy_requests_count_from_there_on():
    """So is an empty schedule sent behind the warm-up of a server with ``--pat-log``."""
    world = World(BASE, 0, policy="manual")
    world.send(*requests(2))
    world.run()
    world.set([])
    world.send(*requests(3))
    world.run()
    kinds = [event["event"] for event in world.log]
    behind = kinds.index("counting") + 1
    assert kinds[:behind].count("length") == 2 and kinds[behind:].count("length") == 3
    assert max(e["snapshot"]["arrived"] for e in world.log[behind:] if e["event"] == "decision") == 3


def repeated(log: list[dict], seed: int) -> World:
    """An engine that follows what the log of another one says."""
    return started([msgspec.structs.asdict(entry) for entry in parse("\n".join(map(json.dumps, log)))], seed)


def drained_and_filled(world: World) -> World:
    """Four of eight end, and five more come."""
    world.send(*requests(4, 10), *requests(4, 400))
    world.run(until=lambda world: world.layout.tp == 4)
    world.send(*requests(5, 100))
    world.run()
    return world


@pytest.mark.parametrize("seed", range(5))
def test_a_log_of_threshold_is_repeated(seed):
    """It merges at 4, splits when 9 are there, merges again, and goes back when none is left."""
    first = drained_and_filled(World(BASE, seed, policy="threshold", switch_at=4))
    assert [fired.alive for fired in first.fired] == [4, 9, 4, 0]
    again = drained_and_filled(repeated(first.log, seed + 100))
    assert [record.to_tp for record in again.coordinator.account.records] == [4, 1, 4, 1]
    for fired, wanted in zip(again.fired, (4, 9, 4, 0), strict=True):
        assert abs(wanted - fired.alive) < 4, "the requests of a group may end together"
    assert again.coordinator._follower.schedule.over


def ahead(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """As ``survival``: a round of a known size is merged before its first request."""
    return Decision(tp=4 if len(snapshot.coming) else 1 if not snapshot.requests else snapshot.tp)


def rounds(world: World) -> World:
    for _ in range(4):
        world.send(*requests(3, 20))
        world.run()
    return world


@pytest.mark.parametrize("seed", range(5))
def test_a_switch_ahead_of_a_round_is_repeated_before_its_first_token(seed):
    first = rounds(World(BASE, seed, policy="survival", decide=ahead, profile="-"))
    assert [record.to_tp for record in first.coordinator.account.records] == [4, 1, 4, 1]
    before = [fired.generated for fired in first.fired]
    again = rounds(repeated(first.log, seed + 100))
    assert [record.to_tp for record in again.coordinator.account.records] == [4, 1, 4, 1]
    assert [fired.generated for fired in again.fired] == before


def test_what_does_not_count_in_a_schedule_does_not_in_a_log():
    """The server says when its warm-up is over; health probes come at any time."""
    world = World(BASE, 0, policy="threshold", switch_at=4)
    world.send(*requests(1, 8))
    world.run()
    world.set([])
    world.send(*requests(1, 8), counts=False)
    world.run()
    drained_and_filled(world)
    assert [entry.came for entry in parse("\n".join(map(json.dumps, world.log)))][-3] == 13


ENTRIES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"tp": st.sampled_from((1, 2, 4)), point: st.integers(0, 60)})
        for point in ("step", "batch", "tokens", "left", "came")
    )
    | st.fixed_dictionaries({"tp": st.sampled_from((1, 2, 4)), "came": st.integers(0, 12), "left": st.integers(0, 12)}),
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
