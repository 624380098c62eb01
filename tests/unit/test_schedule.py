"""Schedules carried out: replicas hold exactly where they say so."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.decision_log import encode_event
from sglang_pat.coordinator.schedule import check
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import Reconfigure
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Snapshot
from sglang_pat.replay import read_schedule

from .drawn import examples
from .schedule_world import BASE, Request, World


def requests(count: int, length: int = 100, prefills: int = 1) -> list[Request]:
    return [Request(length + i, prefills) for i in range(count)]


def start_world(entries: list[dict], seed: int = 0, base: ParallelLayout = BASE) -> World:
    world = World(base, seed)
    world.set(entries)
    return world


@pytest.mark.parametrize("seed", range(5))
def test_every_replica_has_made_exactly_so_many_steps(seed):
    world = start_world([{"tp": 2, "arrived": 8, "step": 20}, {"tp": 4, "step": 33}, {"tp": 1, "step": 33}], seed)
    query = world.wait()
    world.send(*requests(3))
    world.run()
    assert not world.fired and query not in world.answers, "not before eight have arrived"
    world.send(*requests(5))
    world.run()
    assert [fired.steps for fired in world.fired] == [dict.fromkeys(range(4), 20), {0: 33, 1: 33}, {0: 33}]
    assert [fired.alive for fired in world.fired] == [8, 8, 8]
    state = world.answers[query].answer
    assert (state.entries, state.done, state.holding) == (3, 3, False)
    assert [(s.from_tp, s.to_tp, s.reason, s.requests) for s in state.switches] == [
        (1, 2, "schedule", 8), (2, 4, "schedule", 8), (4, 1, "schedule", 8),
    ]  # fmt: skip
    assert not any(rank.requests for rank in world.ranks), "then it goes on to the end"


@pytest.mark.parametrize("seed", range(5))
def test_tokens_count_from_where_the_schedule_takes_hold(seed):
    """The instant after a switch counts, too, when the new leaders have not listed their requests yet."""
    world = start_world([{"tp": 2, "arrived": 8, "tokens": 100}], seed)
    world.send(*requests(8, 50))
    world.run(until=lambda world: world.fired)
    world.set([{"tp": 4, "tokens": 100}])
    world.run()
    first, second = world.fired
    # What the replicas do before they hold again does not count.
    assert 100 <= second.generated - first.generated < 200 and second.alive == 8


def test_batches_count_prefills():
    world = start_world([{"tp": 2, "arrived": 4, "batch": 2}])
    world.send(*requests(4, prefills=3))
    world.run()
    assert world.fired[0].batches == dict.fromkeys(range(4), 2)
    assert world.fired[0].steps == dict.fromkeys(range(4), 0)


def test_held_until_there_is_another_schedule():
    world = start_world([{"tp": 2, "arrived": 2, "step": 5}, {"step": 9, "hold": True}])
    query = world.wait()
    world.send(*requests(2))
    world.run()
    assert world.answers[query].answer.holding
    assert {world.ranks[rank].steps for rank in world.layout.leaders} == {9}
    world.set([{"step": 4, "hold": True}])  # counted from now on
    world.run()
    assert {world.ranks[rank].steps for rank in world.layout.leaders} == {13}
    world.set([])
    world.run()
    assert not any(rank.requests for rank in world.ranks)


def test_a_schedule_that_is_replaced_answers_who_waits():
    world = start_world([{"tp": 2, "arrived": 100}])
    query = world.wait()
    world.run()
    world.set([])
    assert world.answers[query].answer.done == 0
    world.send(*requests(3))
    world.run()
    assert not world.fired and not any(rank.requests for rank in world.ranks)


@pytest.mark.parametrize("entries", [[], [{"tp": 4, "step": 3}, {"tp": 1, "step": 9}]])
@pytest.mark.parametrize("seed", range(10))
def test_a_schedule_that_is_replaced_during_its_switch(entries, seed):
    """The switch is carried through, and counts for the schedule that wanted it, not for the new one."""
    world = start_world([{"tp": 2, "arrived": 4, "step": 5}], seed)
    world.send(*requests(4))
    world.run(until=lambda w: w.coordinator._switching.under_way or w.coordinator._switching.wanted)
    world.set(entries)
    query = world.wait()
    world.run()
    assert world.answers[query].answer.done == len(entries) == len(world.answers[query].answer.switches)
    assert [record.to_tp for record in world.coordinator.account.records] == [2, *(entry["tp"] for entry in entries)]
    assert not any(rank.requests for rank in world.ranks)


def test_an_entry_of_the_layout_in_force_switches_nothing():
    world = start_world([{"tp": 1, "arrived": 1, "step": 3}, {"tp": 2, "step": 3}])
    world.send(*requests(2))
    world.run()
    assert [fired.alive for fired in world.fired] == [2]


def test_a_request_to_switch_comes_in_between():
    """The replicas that the request merges in the middle of their way hold, and then go on to the entry's step."""
    world = start_world([{"tp": 4, "arrived": 4, "step": 50}])
    world.send(*requests(4))
    world.run(until=lambda w: w.ranks[0].steps == 20)
    world.coordinator.reconfigure(Reconfigure(query_id=999, tp=2), 0.0)
    world.run()
    first, second = world.fired
    assert any(steps < 50 for steps in first.steps.values())
    assert second.steps == {0: 50, 1: 50} and second.alive == 4 and world.layout.tp == 4
    assert not any(rank.requests for rank in world.ranks)


def test_under_another_policy_requests_count_from_there_on():
    """An empty schedule is sent so behind the warm-up of a server with ``--pat-log``."""
    world = World(BASE, 0, policy="manual")
    world.send(*requests(2))
    world.run()
    world.set([])
    world.send(*requests(3))
    world.run()
    kinds = [json.loads(event)["event"] for event in world.log]
    behind = kinds.index("counting") + 1
    assert kinds[:behind].count("length") == 2 and kinds[behind:].count("length") == 3


def decide_in_a_tail(snapshot: Snapshot, history: LengthHistory) -> Decision:
    """Merged when four are left; a round of a known size is merged before its first request, as ``survival`` does."""
    merged = len(snapshot.coming) or (snapshot.peak > 4 and 0 < len(snapshot.load) <= 4)
    return Decision(tp=4 if merged else 1 if not snapshot.requests else snapshot.tp)


def rounds(world: World, *lengths: int) -> World:
    for _ in range(4):
        world.send(*(Request(length) for length in lengths))
        world.run()
    return world


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lengths", [(20, 20, 20), (10, 10, 10, 10, 40, 40, 40, 40)], ids=["ahead", "in a tail"])
def test_a_log_is_repeated_by_tokens(seed, lengths, tmp_path):
    """A switch ahead of a round is one before its first token."""
    first = rounds(World(BASE, seed, policy="survival", decide=decide_in_a_tail, profile="-"), *lengths)
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(first.log))
    entries = read_schedule(path)
    assert [entry["tp"] for entry in entries] == [record.to_tp for record in first.coordinator.account.records]
    again = rounds(start_world(entries, seed + 100), *lengths)
    for entry, fired in zip(entries, again.fired, strict=True):
        assert entry["tokens"] <= fired.generated < entry["tokens"] + len(lengths)
    assert again.coordinator._schedule.over


def test_a_log_without_tokens_is_not_repeated(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(encode_event("start", policy="threshold", switch_at=8, profile=None, max_running=None))
    with pytest.raises(ValueError, match="line 1: it is of the policy threshold, which another engine repeats by"):
        read_schedule(path)


def test_what_does_not_count_in_a_schedule():
    """The server says when its warm-up is over; health probes come at any time."""
    world = start_world([{"tp": 2, "arrived": 2}])
    world.send(*requests(3), counts=False)
    world.run()
    assert not world.fired
    world.send(*requests(2))
    world.run()
    assert [fired.alive for fired in world.fired] == [5]


BAD = {
    "two points": ({"tp": 2, "step": 1, "tokens": 2}, "entry 2: step and tokens in one entry: give one of them"),
    "negative": ({"tp": 2, "step": -1}, "entry 2: Expected `int` >= 0"),
    "too large": ({"tp": 2, "tokens": 10**400}, "entry 2: Expected `int` <= 9007199254740992"),
    "unknown": ({"tp": 2, "left": 3}, "unknown field `left`"),
    "degree": ({"tp": 3}, r"entry 2: tp=3 is not a candidate; choose one of [1, 2, 4]"),
    "stride": ({"stride": 3}, "entry 2: stride=3: choose one of [2, 4] (--pat-candidates 1,2,4)"),
    "degree and stride": ({"tp": 2, "stride": 2}, "entry 2: tp and stride in one entry: give one after the other"),
    "hold in the middle": ({"hold": True}, "hold: only the last entry may have it"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_entries_get_one_line(kind):
    value, says = BAD[kind]
    config = AdaptiveConfig(base=BASE, policy="schedule")
    with pytest.raises(ValueError) as error:
        check([{"tp": 2}, value, {"tp": 4}], config)
    assert says in str(error.value) and "\n" not in str(error.value)


ENTRIES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"tp": st.sampled_from((1, 2, 4)), point: st.integers(0, 60)})
        for point in ("step", "batch", "tokens", "arrived")
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
    world = start_world(entries, seed)
    world.send(*(Request(length, prefills) for length, prefills in lengths))
    world.run()
    world.set([])
    world.run()
    assert sum(rank.generated for rank in world.ranks) == sum(length for length, _ in lengths)
    assert not any(rank.requests for rank in world.ranks)
