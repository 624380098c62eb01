"""What counts as a round, and when it is complete."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.coordinator.round_tracker import MOST_OPEN, PROMPT_TOKENS, RoundTracker
from sglang_pat.messages import LEASE_SECONDS, BeginRound, EndRound
from sglang_pat.policies.snapshot import Load

from .drawn import examples

pytestmark = pytest.mark.unit


def after(*sizes: int) -> RoundTracker:
    """Rounds of these sizes have ended."""
    arrivals = RoundTracker()
    for size in sizes:
        come(arrivals, size)
        arrivals.update_request_count(0)
    return arrivals


def come(arrivals: RoundTracker, requests: int) -> list[bool]:
    """These come one after another and stay; whether the round was complete after each."""
    result, before = [], arrivals.came
    for number in range(1, requests + 1):
        arrivals.record_arrival(float(number))
        arrivals.update_request_count(before + number)
        result.append(arrivals.complete)
    return result


COMPLETE = [
    ("nothing is known of the first round", [], 100, []),
    ("nor is the first one believed, which may be a warm-up", [3], 3, []),
    ("which may be smaller", [4], 16, []),
    ("the third is complete with its last request", [3, 3], 3, [3]),
    ("a warm-up does not matter", [2, 3, 3], 3, [3]),
    ("rounds of one, health probes, do not count", [1, 1], 5, []),
    ("nor are they among the four that are remembered", [3, 3, 1, 1, 1, 1, 1], 3, [3]),
    ("one that outgrows the others: as nothing tells the first time", [2, 2], 4, [2]),
    ("then nothing is known", [2, 2, 4], 4, []),
    ("until two have had the new size", [2, 2, 4, 4], 4, [4]),
    ("the largest of the last four counts", [5, 5, 2, 2], 5, [5]),
    ("one of 5 is left: either may come", [5, 5, 2, 2, 2], 2, []),
    ("none is left", [5, 5, 2, 2, 2, 2], 2, [2]),
]


@pytest.mark.parametrize(("sizes", "requests", "at"), [c[1:] for c in COMPLETE], ids=[c[0] for c in COMPLETE])
def test_when_a_round_is_complete(sizes, requests, at):
    arrivals = after(*sizes)
    assert not arrivals.complete, "an empty engine is not"
    assert [number for number, found in enumerate(come(arrivals, requests), 1) if found] == at
    assert (arrivals.peak, arrivals.came, arrivals.last) == (requests, requests, float(requests))


def load(*families: int) -> Load:
    numbers = np.arange(len(families))
    return Load(prompt=10 + numbers, output=numbers, limit=0 * numbers + 64, family=np.array(families), replica=numbers)


def track_rounds(sizes: list[int], *loads: Load) -> RoundTracker:
    """Rounds of these sizes have ended; in each, these were in the engine at one time or another."""
    arrivals = RoundTracker()
    for size in sizes:
        come(arrivals, size)
        for found in loads:
            arrivals.record_load(found)
        arrivals.update_request_count(0)
    return arrivals


def test_the_round_to_come_is_like_the_last_one_before_its_first_token():
    """The later one of two looks is kept: when all have come, leaders have not told yet who are siblings."""
    arrivals = track_rounds([3, 3], load(5), load(-1, -2, -3), load(8, 9, 8), load(9))
    coming = arrivals.predict_round_load(100.0)
    assert (coming.prompt.tolist(), coming.output.tolist(), coming.limit.tolist()) == ([10, 11, 12], [0] * 3, [64] * 3)
    assert coming.family[0] == coming.family[2] != coming.family[1] and max(coming.family) < 0
    arrivals.record_arrival(200.0)
    assert len(arrivals.predict_round_load(200.5)) == 3
    assert len(arrivals.predict_round_load(201.0)) == 0, "none came for a while"
    arrivals.record_arrival(201.0), arrivals.record_arrival(201.0)
    assert len(arrivals.predict_round_load(201.0)) == 0, "all are there"


@pytest.mark.parametrize(
    ("sizes", "loads"),
    [([3], [load(1, 2, 3)]), ([3, 4], [load(1, 2, 3)]), ([20, 20], [load(*range(17))]), ([3, 3], [])],
    ids=["one round", "two sizes", "never all at once", "not looked at"],
)
def test_nothing_is_known_of_the_round_to_come(sizes, loads):
    assert len(track_rounds(sizes, *loads).predict_round_load(100.0)) == 0


def announce_rounds(*begun: BeginRound, arrivals: RoundTracker | None = None) -> RoundTracker:
    arrivals = arrivals or RoundTracker()
    for one in begun:
        arrivals.update_announced_round(one, 0.0)
    return arrivals


def test_a_round_that_was_announced_is_complete_when_it_is():
    """Earlier rounds do not matter, and nothing is waited for."""
    for arrivals in (RoundTracker(), after(2, 2)):
        assert come(announce_rounds(BeginRound(requests=3), arrivals=arrivals), 3) == [False, False, True]
        arrivals.record_arrival(9.0)
        assert arrivals.complete, "more came than was said"


def test_what_goes_on_with_a_sample_is_not_another_one():
    arrivals = announce_rounds(BeginRound(requests=2))
    come(arrivals, 1)
    for _ in range(3):
        arrivals.record_arrival(5.0, sample=False)
    assert (arrivals.missing, arrivals.complete) == (1, False)
    come(arrivals, 1)
    assert arrivals.complete


def test_it_goes_on_though_the_engine_is_empty():
    arrivals = announce_rounds(BeginRound(requests=2))
    come(arrivals, 2)
    arrivals.switches = 1
    arrivals.update_request_count(0)
    assert (arrivals.came, arrivals.peak, arrivals.switches, arrivals.complete) == (2, 2, 1, True)
    arrivals.update_announced_round(EndRound(name="another"), 6.0)
    assert arrivals.open and arrivals.came == 2
    arrivals.update_announced_round(EndRound(name="default"), 6.0)
    assert not arrivals.open and (arrivals.came, arrivals.peak, arrivals.switches) == (0, 0, 0)


def test_the_next_one_of_that_name_takes_its_place():
    arrivals = announce_rounds(BeginRound(requests=5))
    come(arrivals, 2)
    arrivals.update_request_count(0)
    arrivals.update_announced_round(BeginRound(requests=3), 6.0)
    assert (len(arrivals.open), arrivals.missing, arrivals.came) == (1, 3, 0)


def test_what_it_leaves_in_the_engine_is_not_of_the_next_one():
    """Two responses that run and one in a queue, aborted: of the last one no report tells."""
    arrivals = announce_rounds(BeginRound(name="a", requests=4, kind="short"), arrivals=RoundTracker((1, 2)))
    come(arrivals, 4)
    arrivals.record_response_end(5.0)
    arrivals.update_request_count(3)
    arrivals.retracted, arrivals.tokens = 9, 100
    arrivals.update_announced_round(EndRound(name="a"), 6.0)
    assert (arrivals.came, arrivals.retracted) == (0, 0)
    arrivals.update_announced_round(BeginRound(name="b", requests=2, kind="long"), 6.0)
    arrivals.update_request_count(3)
    assert (arrivals.peak, arrivals.start) == (0, 1) and len(arrivals.predict_round_load(6.0)) == 2
    arrivals.record_arrival(6.0)
    arrivals.update_request_count(4)
    for here in (3, 1):
        arrivals.record_response_end(6.0)
        arrivals.update_request_count(here)
    assert (arrivals.came, arrivals.peak, arrivals._left) == (1, 1, 0) and len(arrivals.predict_round_load(6.0)) == 2
    arrivals.record_response_end(7.0)
    assert not len(arrivals.predict_round_load(6.0))
    arrivals.update_announced_round(EndRound(name="b"), 8.0)
    assert announce_rounds(BeginRound(name="c", requests=4, kind="short"), arrivals=arrivals).start == 2


@pytest.mark.parametrize("name", ["default", "another"])
def test_an_end_that_ends_nothing_is_none_of_what_nobody_announced(name):
    arrivals = RoundTracker()
    come(arrivals, 3)
    arrivals.update_announced_round(EndRound(name=name), 5.0)
    assert (arrivals.came, arrivals.peak) == (3, 3)


def test_two_rounds_count_as_one():
    arrivals = announce_rounds(BeginRound(name="a", requests=3), BeginRound(name="b", requests=2))
    assert come(arrivals, 5) == [False] * 4 + [True]
    arrivals.update_announced_round(EndRound(name="b"), 6.0)
    arrivals.update_announced_round(BeginRound(name="b", requests=4), 6.0)
    assert (arrivals.missing, arrivals.came) == (4, 5), "of the first one all have come"
    arrivals.update_announced_round(EndRound(name="b"), 7.0)
    assert (arrivals.missing, arrivals.complete) == (0, True), "nobody waits for what does not come"


def test_one_whose_client_is_gone_is_over():
    arrivals = announce_rounds(BeginRound(requests=5, lease_seconds=LEASE_SECONDS))
    come(arrivals, 2)
    arrivals.end_silent_rounds(1.9 + LEASE_SECONDS)
    assert arrivals.open and arrivals.get_status(LEASE_SECONDS)["open"][0]["lease_left"] == 2.0
    arrivals.end_silent_rounds(2.0 + LEASE_SECONDS)
    assert not arrivals.open and (arrivals.missing, arrivals.came) == (0, 0)
    assert arrivals.get_status(LEASE_SECONDS) == {"open": [], "missing": 0, "start": 1}


@pytest.mark.parametrize("named", [True, False], ids=["requests say their round", "they do not"])
@pytest.mark.parametrize("size", [64, None], ids=["of 64", "of unknown size"])
def test_a_dead_round_beside_a_live_client_ends(named, size):
    """Requests of the live one, all of which come while the other is open, are not taken for the other's."""
    arrivals = announce_rounds(BeginRound(name="dead", requests=size, lease_seconds=LEASE_SECONDS))
    for now in range(0, int(LEASE_SECONDS), 50):
        arrivals.update_announced_round(BeginRound(name="live", requests=8, lease_seconds=LEASE_SECONDS), now)
        for _ in range(8):
            assert arrivals.record_arrival(now, name="live" if named else "") == "live"
        assert arrivals.missing == (size or 0) and list(arrivals.open) == ["dead", "live"]
        for _ in range(3):  # turns of agents
            assert arrivals.record_arrival(now, sample=False, name="live" if named else "") == "live"
        arrivals.update_request_count(0)
        arrivals.update_announced_round(EndRound(name="live"), now + 40)
        arrivals.end_silent_rounds(now + 40)
    arrivals.end_silent_rounds(LEASE_SECONDS)
    assert not arrivals.open and not arrivals.missing


def test_requests_that_nobody_can_attribute_renew_nothing():
    """All samples of the dead round have come; these are of a client that announces nothing, or of another round."""
    arrivals = announce_rounds(BeginRound(name="dead", requests=2, lease_seconds=LEASE_SECONDS))
    come(arrivals, 2)
    for now in range(10, int(LEASE_SECONDS), 10):
        assert arrivals.record_arrival(now) == ""
        assert arrivals.record_arrival(now, name="other") == "other"
    arrivals.end_silent_rounds(2 + LEASE_SECONDS)
    assert not arrivals.open


def test_a_client_in_the_process_of_the_engine_needs_no_lease():
    arrivals = announce_rounds(BeginRound(requests=2))
    arrivals.end_silent_rounds(1e9)
    assert arrivals.get_status(1e9)["open"][0]["lease_left"] is None


def test_two_clients_that_do_not_name_their_requests_have_all_that_they_announced():
    arrivals = announce_rounds(BeginRound(name="a", requests=3), BeginRound(name="b", requests=2))
    assert [arrivals.record_arrival(1.0) for _ in range(6)] == ["b", "b", "a", "a", "a", ""]
    assert not arrivals.missing


def test_one_of_unknown_size_is_complete_as_if_nobody_had_announced_it():
    arrivals = announce_rounds(BeginRound(), arrivals=after(3, 3))
    assert come(arrivals, 3) == [False, False, True]
    arrivals.update_request_count(0)
    assert arrivals.open and arrivals.came == 3
    assert come(announce_rounds(BeginRound()), 3) == [False] * 3


def test_what_does_not_count_may_come_before_its_first_request():
    """A health probe, or a calibration."""
    arrivals = announce_rounds(BeginRound(requests=3))
    arrivals.update_request_count(4)
    arrivals.update_request_count(0)
    assert arrivals.peak == 0 and len(arrivals.predict_round_load(1.0)) == 3


def test_no_more_are_open_than_anybody_needs():
    arrivals = announce_rounds(*(BeginRound(name=f"job{number}", requests=1) for number in range(MOST_OPEN + 5)))
    assert len(arrivals.open) == arrivals.missing == MOST_OPEN and "job4" not in arrivals.open


def test_the_round_to_come_is_as_it_was_announced():
    first = BeginRound(name="a", requests=4, prompts=2, prompt_tokens=70, max_new_tokens=90)
    arrivals = announce_rounds(first, BeginRound(name="b", requests=1, prompt_tokens=7, max_new_tokens=9))
    coming = arrivals.predict_round_load(0.0)
    assert (coming.prompt.tolist(), coming.limit.tolist()) == ([70] * 4 + [7], [90] * 4 + [9])
    assert coming.family.tolist() == [-1, -1, -2, -2, -3] and not coming.output.any()
    come(arrivals, 2)
    assert len(arrivals.predict_round_load(2.5)) == 5 and not len(arrivals.predict_round_load(3.5)), (
        "no more came for a while"
    )
    arrivals.record_response_end(2.5)
    assert not len(arrivals.predict_round_load(2.5)), "what comes now comes in place of what has ended"


def test_prompts_that_nobody_tells_of_are_as_long_as_those_before():
    arrivals = announce_rounds(BeginRound(requests=2))
    assert arrivals.predict_round_load(0.0).prompt.tolist() == [PROMPT_TOKENS] * 2
    come(arrivals, 2)
    arrivals.record_load(load(1, 2, 3))
    arrivals.update_announced_round(EndRound(), 5.0)
    arrivals.update_request_count(0)
    arrivals.update_announced_round(BeginRound(requests=2), 6.0)
    assert arrivals.predict_round_load(6.0).prompt.tolist() == [11, 11]


@examples(300)
@given(st.lists(st.one_of(st.just("comes"), st.integers(0, 6)), max_size=60))
def test_against_the_whole_story(events):
    """Everything told again from the list of all events; a number: so many are left at most."""
    arrivals, there, story = RoundTracker(), 0, [[]]
    for now, event in enumerate(events):
        if event == "comes":
            arrivals.record_arrival(now)
            there += 1
        else:
            there = min(there, event)
        arrivals.update_request_count(there)
        story[-1].append((event, there))
        if there == 0:
            story.append([])
    sizes = [sum(event == "comes" for event, _ in part) for part in story]
    known = [size for size in sizes[:-1] if size > 1][-4:]
    assert arrivals.came == sizes[-1]
    assert arrivals.peak == max((count for _, count in story[-1]), default=0)
    assert arrivals.last == max((now for now, event in enumerate(events) if event == "comes"), default=float("-inf"))
    assert arrivals.complete == (known.count(max(known, default=0)) >= 2 and sizes[-1] == max(known))
