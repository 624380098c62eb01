"""The degree in which a round starts: RollPacker's rule, and what the coordinator makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from sglang_pat import messages as m
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.rules import RETRY_SECONDS
from sglang_pat.policies.snapshot import Decision
from sglang_pat.policies.start import LONGEST_QUIET, MOST_KINDS, TOO_MANY, RoundKind, StartDegree, StartDegrees

from .coordinator_rig import Rig
from .policy_world import crossing, machine, snapshot
from .test_survival import LEARNT, policy

pytestmark = pytest.mark.unit

TOKENS = 100_000
MANY, SOME = 2 * int(TOO_MANY * TOKENS), int(TOO_MANY * TOKENS) // 2


def degrees(start: StartDegree, counts: list[int], tokens: int = TOKENS, seconds: float = 1.0) -> list[int]:
    return [start.observe(count, tokens, seconds) for count in counts]


def at(tp: int, degrees: tuple[int, ...] = (1, 2, 4)) -> StartDegree:
    """Doubled up to ``tp``."""
    start = StartDegree(degrees)
    while start.tp < tp:
        start.observe(MANY, TOKENS, 1.0)
    return start


def test_retractions_double_tp():
    assert degrees(StartDegree([1, 2, 4]), [10_000] * 4) == [2, 4, 4, 4]


def test_it_goes_back_where_doubling_does_not_pay_and_tries_again_late():
    """KV is short in the whole engine, or steps are slow in tp2: with or without retractions there."""
    for there in (0, MANY):
        start, found = StartDegree([1, 2, 4]), [1]
        for _ in range(2 * LONGEST_QUIET):
            slow = found[-1] == 2
            found.append(start.observe(there if slow else MANY, TOKENS, 1.3 if slow else 1.0))
        assert found[:4] == [1, 2, 1, 1] and found.count(2) == 2 and max(found) == 2


def test_it_is_the_retractions_a_token_that_count():
    assert degrees(StartDegree([1, 2]), [MANY], TOKENS) == [2]
    assert degrees(StartDegree([1, 2]), [MANY], 10 * TOKENS) == [1]
    assert degrees(StartDegree([1, 2]), [1, 3], tokens=100) == [1, 1], "too few to say anything"


def test_between_the_thresholds_the_degree_stays():
    assert set(degrees(at(2), [SOME] * 50)) == {2}


def test_quiet_rounds_halve_it():
    assert degrees(at(4), [0] * 9) == [4, 4, 4, 2, 2, 2, 2, 1, 1]


def test_a_degree_that_was_too_low_is_tried_again_later_and_later():
    """tp 1 never does: it is tried after 4, 8, 16, … quiet rounds."""
    start, tp, lowered = at(2, (1, 2)), 2, []
    for number in range(130):
        now = start.observe(MANY if tp == 1 else 0, TOKENS, 1.0)
        lowered += [number] * (now < tp)
        tp = now
    assert [after - before for before, after in pairwise([-2, *lowered])] == [5, 9, 17, 33, 65]


def test_rounds_of_another_size_or_name_have_a_degree_of_their_own():
    starts = StartDegrees([1, 2])
    starts.get_start_degree(RoundKind("", 100)).observe(MANY, TOKENS, 1.0)
    starts.get_start_degree(RoundKind("long", 100)).observe(MANY, TOKENS, 1.0)
    assert [starts.get_start_degree(RoundKind("", size)).tp for size in (0, 50, 95, 105, 200)] == [1, 1, 2, 2, 1]
    assert [starts.get_start_degree(RoundKind("long", size)).tp for size in (0, 100)] == [1, 2]
    assert starts.get_start_degree(RoundKind("short", 100)).tp == 1


def test_what_was_seen_before_the_size_was_known_counts():
    """Nobody announces rounds: the size is known with the third."""
    starts = StartDegrees([1, 2])
    starts.get_start_degree(RoundKind()).observe(MANY, TOKENS, 1.0)
    known = starts.get_start_degree(RoundKind("", 100))
    assert known.tp == 2
    degrees(known, [0] * 4)
    assert (known.tp, starts.get_start_degree(RoundKind()).tp) == (1, 2)


def test_of_kinds_whose_names_clients_choose_only_the_last_are_remembered():
    starts = StartDegrees([1, 2])
    first = starts.get_start_degree(RoundKind("kind 0", 64))
    for number in range(1, MOST_KINDS):
        found = starts.get_start_degree(RoundKind(f"kind {number}", 64))
        assert starts.get_start_degree(RoundKind(f"kind {number}", 64)) is found
    assert starts.get_start_degree(RoundKind("kind 0", 64)) is not first
    assert len(starts._kinds) <= MOST_KINDS


# -- the policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["threshold", "pat", "survival"])
def test_no_policy_goes_below_the_degree_in_which_the_round_started(name):
    predictor, costs = machine(crossing())
    decide = make_policy(name, switch_at=4, predictor=predictor, costs=costs)

    def tp(outputs=(10,) * 64, start=2, **kwargs) -> int:
        return decide(replace(snapshot(list(outputs), **kwargs), start=start), LEARNT).tp

    assert tp(start=1) == 1 and tp() == 2 and tp(tp=2) == 2 and tp(tp=4, start=4) == 4
    assert tp((1000,), tp=2, peak=64) == 4, "above it the load decides"
    assert tp((), tp=2) == 1, "an empty engine goes home, where weights are updated"
    assert tp(since_abort=RETRY_SECONDS / 2) == 1 and tp(since_switch=0.1) == 1, "as with any raise"


@pytest.mark.parametrize(
    ("room", "expected"), [({}, 1), (dict.fromkeys((1, 2, 4), 10**6), 1), ({1: 600, 2: 4000, 4: 20_000}, 2)], ids=str
)
def test_survival_starts_where_kv_lets_most_of_the_round_run_at_once(room, expected):
    """One request of 600 tokens runs in a replica of tp1: the others wait, and the step is not much shorter."""
    situation = snapshot(requests=1, coming=128, quiet=0.0)
    assert policy(crossing())(replace(situation, room=room), LEARNT).tp == expected


# -- the coordinator ---------------------------------------------------------------------------------


def crowd_round(rig: Rig, requests: int, retracted: int, announced: bool) -> None:
    """A round in which so many were retracted."""
    if announced:
        rig.coordinator.handle_round(m.BeginRound(requests=requests), 0.0)
    rig.work(requests)
    rig.settle()
    rig.world.retracted = retracted
    rig.finish_all()
    if announced:
        rig.coordinator.handle_round(m.EndRound(), 0.0)
    rig.settle()


def kinds(*rounds: tuple[str, int, int], sized: bool) -> list[int]:
    """The degree in which each of these rounds starts: what it is called, its requests, and how many are retracted."""
    rig, found = Rig(1, 2, policy="threshold", switch_at=1), []
    for kind, requests, retracted in rounds:
        size = {"requests": requests} if sized else {}
        rig.coordinator.handle_round(m.BeginRound(kind=kind, **size), 0.0)
        rig.work(requests)
        rig.settle()
        found.append(rig.coordinator.layout.tp)
        rig.world.retracted = retracted
        rig.finish_all()
        rig.coordinator.handle_round(m.EndRound(), 0.0)
        rig.settle()
    return found


@pytest.mark.parametrize("sized", [True, False])
def test_what_is_seen_in_rounds_of_one_kind_counts_for_that_kind(sized):
    """A kind is a size, as of short and long rounds of tail batching; and any size, if nobody says it."""
    crowded, empty = ("long", 16, 10), ("short", 17, 0)
    assert kinds(crowded, empty, ("long", 16 if sized else 40, 0), empty, sized=sized) == [1, 1, 2, 1]
    assert kinds(crowded, ("", 16, 0), sized=sized) == [1, 1]
    assert kinds(("", 16, 10), ("", 16, 0), ("", 16, 0), sized=sized) == [1, 2, 2], "also once the size is known"


@pytest.mark.parametrize("announced", [True, False])
def test_the_round_after_a_crowded_one_starts_in_twice_the_degree(announced):
    rig = Rig(1, 4, policy="threshold", switch_at=1, degrees=(1, 2, 4))
    crowd_round(rig, 16, 10, announced)
    assert not rig.world.records
    if announced:
        rig.coordinator.handle_round(m.BeginRound(requests=16), 0.0)
        assert not rig.world.records, "there is nothing to do yet"
    rig.world.to_leaders.clear()
    rig.work(16)
    assert {type(obj) for _, obj in rig.world.to_leaders} == {m.Prepare}, "the requests wait for the switch"
    rig.settle()
    assert [(record.to_tp, record.reason, record.requests) for record in rig.world.records] == [(2, "threshold", 0)]
    assert sum(len(rank.requests) for rank in rig.world.ranks[:2]) == 16
    rig.finish_all()
    if announced:
        assert rig.world.known.tp == 2, "more of the round may come"
        rig.coordinator.handle_round(m.EndRound(), 0.0)
        rig.settle()
    assert rig.world.known.tp == 1


def test_a_switch_to_the_start_that_fails_is_not_repeated_at_once():
    rig = Rig(1, 2, policy="threshold", switch_at=1)
    crowd_round(rig, 8, 10, announced=False)
    rig.work(8)
    rig.settle("abort")
    assert [record.error for record in rig.world.records] == ["rank 0: no"]
    assert sum(len(rank.requests) for rank in rig.world.ranks) == 8


def test_policies_that_predict_are_shown_the_room():
    rig = Rig(1, 2, decide=lambda snapshot, _: Decision(tp=snapshot.tp), policy="survival", profile="-", calibrate=0)
    rig.world.kv_totals = {1: 100, 2: 200}
    rig.work(1)
    rig.settle()
    rig.coordinator.handle_timer(1.0)
    assert rig.world.decisions[-1][0].room == {1: 100, 2: 200}


def test_where_the_user_decides_nothing_starts_by_itself():
    rig = Rig(1, 4, policy="manual")
    crowd_round(rig, 16, 10, announced=True)
    assert rig.work(16) and not rig.world.records
