"""Which engine gets a request, and when a session leaves its engine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat import messages as m
from sglang_pat.integrations import balance
from sglang_pat.integrations.balance import Balancer, EngineReport

from .coordinator_rig import Rig


def balancer(*reports: EngineReport, margin: float = 2) -> Balancer:
    made = Balancer(margin)
    for number, report in enumerate(reports):
        made.add(f"e{number}")
        made.report(f"e{number}", report)
    return made


def test_new_sessions_spread_evenly_by_gpu():
    made = balancer(EngineReport(gpus=8), EngineReport(gpus=8), EngineReport(gpus=4))
    counts = Counter(made.acquire(f"s{i}") for i in range(50))
    assert counts == {"e0": 20, "e1": 20, "e2": 10}


def test_equals_are_chosen_at_random():
    made = balancer(EngineReport(), EngineReport(), EngineReport())
    counts = Counter()
    for i in range(300):
        name = made.acquire(f"s{i}")
        made.release(name)
        counts[name] += 1
    assert min(counts.values()) > 60


def test_a_session_stays_where_its_prefix_is():
    made = balancer(EngineReport(), EngineReport())
    homes = {f"s{i}": made.acquire(f"s{i}") for i in range(4)}
    for name in homes.values():
        made.release(name)
    assert {session: made.acquire(session) for session in homes} == homes
    assert made.moved == 0


def test_a_session_leaves_an_engine_that_is_much_busier():
    """The tail: one engine has what is left, the other idles."""
    made = balancer(EngineReport(gpus=2, replicas=1), EngineReport(gpus=2, replicas=1))
    made.engines["e0"].in_flight = 6
    made.sessions["long"] = "e0"
    assert made.acquire("long") == "e1" and made.moved == 1
    made.sessions["other"], made.engines["e0"].in_flight = "e0", 3
    made.engines["e1"].in_flight = 1
    assert made.acquire("other") == "e0", "not for a small difference"


def test_where_it_decodes_at_once_goes_before_where_it_waits():
    full = EngineReport(slots=4, expected_seconds=9.0)
    made = balancer(full, EngineReport(gpus=1, slots=16))
    made.engines["e0"].in_flight, made.engines["e1"].in_flight = 4, 10
    assert made.acquire("new") == "e1"
    made.sessions["old"] = "e0"
    assert made.acquire("old") == "e1", "its prefix is not worth the wait"


def test_when_all_are_full_the_one_that_is_done_first():
    made = balancer(*(EngineReport(waiting=3, expected_seconds=seconds) for seconds in (9.0, 4.0, None)))
    assert made.acquire("new") == "e1"


def full(*expected: float) -> Balancer:
    """Engines of 1,024 slots, all taken, that expect to be done after so many seconds."""
    made = balancer(*(EngineReport() for _ in expected))
    for number, seconds in enumerate(expected):
        made.engines[f"e{number}"].in_flight = 1024
        made.report(f"e{number}", EngineReport(gpus=8, replicas=8, slots=1024, expected_seconds=seconds))
    return made


def test_full_engines_share_what_comes_between_two_looks():
    made = full(120.0, 120.1)
    counts = Counter(made.acquire(f"s{i}") for i in range(600))
    assert abs(counts["e0"] - counts["e1"]) <= 4


def test_a_session_does_not_leave_a_full_engine_for_one_that_is_done_a_moment_earlier():
    made = full(120.0, 120.1, 150.0)
    made.sessions |= {"near": "e1", "far": "e2"}
    assert made.acquire("near") == "e1" and made.moved == 0
    assert made.acquire("far") == "e0" and made.moved == 1


def test_a_prefill_at_the_moment_of_a_look_drives_no_session_away():
    made = balancer(EngineReport(), EngineReport())
    made.engines["e0"].in_flight, made.engines["e1"].in_flight = 100, 110
    for name, waiting in (("e0", 1), ("e1", 0)):
        made.report(name, EngineReport(gpus=8, replicas=8, slots=1024, waiting=waiting, expected_seconds=30.0))
    made.sessions["at home"] = "e0"
    assert made.acquire("at home") == "e0" and made.acquire("new") == "e0"
    made.report("e0", EngineReport(gpus=8, replicas=8, slots=1024, waiting=40, expected_seconds=30.0))
    assert made.acquire("at home") == "e1", "40 are more than a prefill"


def read_status(rig: Rig) -> dict:
    rig.coordinator.handle_status_query(m.StatusQuery(query_id=1), 0.0)
    return rig.world.server[-1].answer


def test_what_an_engine_reports_is_its_status():
    rig = Rig(1, 4)
    rig.work(8)  # each leader has two: one runs, one waits
    rig.settle()
    status = read_status(rig)
    for group in status["groups"]:
        group |= {"kv_total": 1000, "tokens": 100}
    found = EngineReport.from_status(status | {"expected_seconds": 9.0}, max_running=7)
    assert found == EngineReport(4, 4, 28, waiting=4, kv_free=3600, tokens=400, running=4, expected_seconds=9.0)
    rig.reconfigure(2)
    rig.settle()
    found = EngineReport.from_status(read_status(rig), max_running=7)
    assert (found.gpus, found.replicas, found.slots, found.running) == (4, 2, 14, 4)
    assert EngineReport.from_status(status, max_running=None).slots == EngineReport.slots


def test_lent_replicas_take_no_requests():
    rig = Rig(1, 4)
    rig.work(8)
    rig.coordinator.lend_ranks(m.LendRanks(query_id=1, stride=2), 0.0)
    rig.settle()
    found = EngineReport.from_status(read_status(rig), max_running=7)
    assert (found.gpus, found.replicas, found.slots) == (2, 2, 14)


def test_an_engine_that_has_just_switched_is_not_full():
    """The engine's leaders have requests, but have not said yet how much KV there is."""
    rig = Rig(1, 2)
    rig.work(2)
    rig.settle()
    rig.reconfigure(2)
    rig.settle()
    status = read_status(rig)
    status["groups"][0] |= {"kv_total": 0, "tokens": 400}
    made = balancer(EngineReport.from_status(status, max_running=7))
    assert not made.engines["e0"].full


def test_no_room_for_another_context():
    made = balancer(EngineReport(running=4, tokens=4000, kv_free=900), EngineReport(gpus=1))
    made.engines["e1"].in_flight = 4
    assert made.acquire("new") == "e1"


def test_an_engine_that_does_not_answer_gets_nothing_new_until_it_does():
    made = balancer(EngineReport(), EngineReport())
    made.report("e0", None)
    assert {made.acquire(f"s{i}") for i in range(5)} == {"e1"}
    made.report("e1", None)
    assert made.acquire("last") in {"e0", "e1"}, "none answers: the framework is to find out"
    made.report("e0", EngineReport())
    assert made.acquire("s9") == "e0"


def test_none_left():
    made = balancer(EngineReport())
    made.remove("e0")
    made.release("e0")
    made.report("e0", EngineReport())
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        made.acquire("s")


def test_sessions_are_bounded(monkeypatch):
    monkeypatch.setattr(balance, "SESSIONS", 100)
    made = balancer(EngineReport())
    for i in [*range(100), 0, *range(100, 105)]:
        made.acquire(f"s{i}")
    assert len(made.sessions) == 100 and "s0" in made.sessions and "s1" not in made.sessions


@given(st.lists(st.tuples(st.sampled_from(["acquire", "release", "lose", "find", "leave"]), st.integers(0, 9))))
def test_counts_are_right_whatever_happens(events):
    made, held = balancer(*(EngineReport(gpus=2) for _ in range(3))), []
    for kind, number in events:
        name = f"e{number % 3}"
        if kind == "acquire" and made.engines:
            held.append(made.acquire(f"s{number}"))
        elif kind == "release" and held:
            made.release(held.pop(number % len(held)))
        elif kind == "leave":
            made.remove(name)
            held = [other for other in held if other != name]
        else:
            made.report(name, None if kind == "lose" else EngineReport(gpus=2))
    assert {name: engine.in_flight for name, engine in made.engines.items()} == {
        name: held.count(name) for name in made.engines
    }
