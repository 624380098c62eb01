"""The coordinator lends ranks and takes them back (all interleavings: test_coordinator_machine.py)."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from sglang_pat import files
from sglang_pat import messages as m
from sglang_pat.coordinator.replicas import Generation
from sglang_pat.coordinator.switching import RETRY_SECONDS
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import LEASE_SECONDS
from sglang_pat.policies.lending import LendingDecision, Move, Training, make_lending_policy
from sglang_pat.policies.registry import keep_layout
from sglang_pat.policies.snapshot import Decision

from .coordinator_rig import Rig
from .coordinator_world import Merged, Refused, Request
from .policy_world import crossing, machine

pytestmark = pytest.mark.unit


def lend(rig: Rig, stride: int = 2, query_id: int = 0) -> None:
    rig.coordinator.lend_ranks(m.LendRanks(query_id=query_id, stride=stride), 0.0)


def lent(dp: int = 4, tp: int = 1, **options) -> Rig:
    """Half of the ranks are lent, in degree ``tp``."""
    rig = Rig(1, dp, **options)
    rig.work(dp)
    rig.settle()
    if tp > 1:
        rig.reconfigure(tp, query_id=99)
        rig.settle()
    lend(rig)
    rig.settle()
    rig.world.server.clear()
    return rig


def switches(rig: Rig) -> list[tuple[int, int, list[int], str]]:
    return [(record.from_tp, record.to_tp, record.lent, record.reason) for record in rig.world.records]


def test_lent_ranks_get_nothing_and_those_that_work_have_their_requests():
    rig = Rig(1, 4)
    assert rig.work(4) == [0, 1, 2, 3]
    rig.settle()
    lend(rig)
    rig.settle()
    (answer,) = rig.answers()
    assert answer.code == 200
    assert (answer.answer["lent"], answer.answer["requests"], answer.answer["released_bytes"]) == ([1, 3], 4, 200)
    assert [len(rank.requests) for rank in rig.world.ranks] == [2, 0, 2, 0]
    assert sorted(rig.work(4)) == [0, 0, 2, 2]
    rig.settle()
    lend(rig, stride=1, query_id=1)
    rig.settle()
    assert sorted(rig.work(4)) == [0, 1, 2, 3], "all have as many"
    assert switches(rig) == [(1, 1, [1, 3], "lend"), (1, 1, [], "take back")]


def test_the_others_change_their_degree_as_far_as_they_are_enough():
    rig = lent()
    rig.reconfigure(2, query_id=1)
    rig.settle()
    rig.reconfigure(4, query_id=2)
    done, refused = rig.answers()
    assert (done.code, refused.code) == (200, 400)
    assert refused.message == "tp=4: too few ranks work, 2 of 4; take the lent ones back, or choose one of [1, 2]"
    assert rig.coordinator.layout == ParallelLayout(2, 2, 2)


def test_a_degree_that_needs_all_ranks_is_left_first():
    rig = Rig(1, 4)
    rig.work(3)
    rig.settle()
    rig.reconfigure(4)
    rig.settle()
    lend(rig, query_id=1)
    rig.settle()
    assert switches(rig)[1:] == [(4, 2, [], "lend"), (2, 2, [1, 3], "lend")]
    _, answer = rig.answers()
    assert (answer.code, answer.answer["epoch"]) == (200, 3), "one answer"


def test_the_first_of_two_steps_fails():
    rig = Rig(1, 4)
    rig.reconfigure(4)
    rig.settle()
    lend(rig, query_id=1)
    rig.settle(fate="abort")
    _, answer = rig.answers()
    assert (answer.code, answer.message) == (500, "rank 0: no")
    assert rig.coordinator.layout == ParallelLayout(4, 1)


def test_new_weights_take_ranks_back():
    rig = lent(tp=2)
    serial = rig.control("update", needs_base=True, takes_back=True)
    rig.settle()
    assert switches(rig)[-2:] == [(2, 2, [], "control"), (2, 1, [], "control")]
    for rank in range(4):
        rig.world.answer(rank, "update")
    rig.deliver()
    assert rig.world.server == [Merged(serial, (0, 1, 2, 3))]


def test_what_else_needs_all_ranks_is_refused_and_nothing_waits_behind_it():
    rig = lent()
    serial = rig.control("update", needs_base=True)
    says = "ranks 1, 3 are lent; take them back first (POST /pat/take_back_ranks)"
    assert rig.world.server == [Refused(serial, says)]
    assert rig.work(2) == [0, 2] and len(switches(rig)) == 1


def test_other_controls_go_to_lent_ranks_as_well():
    rig = lent()
    serial = rig.control("flush")
    rig.iterate()
    for rank in range(4):
        rig.world.answer(rank, "flush")
    rig.deliver()
    assert rig.world.server == [Merged(serial, (0, 1, 2, 3))]


def test_whoever_lends_hears_of_it_also_if_a_control_request_comes_in_between():
    rig = Rig(1, 4)
    rig.reconfigure(4)
    rig.settle()
    lend(rig, query_id=1)
    serial = rig.control("update", needs_base=True)
    rig.settle()
    assert [answer.query_id for answer in rig.answers()] == [0, 1]
    assert [obj.serial for obj in rig.world.server if isinstance(obj, Refused)] == [serial]


@pytest.mark.parametrize("takes_back", [False, True])
def test_the_base_layout_on_the_way_to_lent_ranks_does_not_stay(takes_back):
    """A release that went to the ranks there would find them lent a moment later, and nothing would get out of it."""
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.settle()
    lend(rig, query_id=1)
    serial = rig.control("update", True, takes_back=takes_back, releases=frozenset({"weights"}))
    rig.settle()
    both = [(2, 1, [], "lend"), (1, 1, [1], "lend")]
    assert switches(rig)[1:] == both + [(1, 1, [], "control")] * takes_back
    if takes_back:
        assert serial in [obj.serial for _, obj in rig.world.to_leaders if isinstance(obj, Request)]
        return
    assert [obj.serial for obj in rig.world.server if isinstance(obj, Refused)] == [serial]
    lend(rig, stride=1, query_id=2)
    rig.settle()
    assert [answer.code for answer in rig.answers()] == [200, 200, 200] and not rig.coordinator.layout.lent


@pytest.mark.parametrize(
    ("before", "entry", "goal"),
    [({"tp": 2}, {"stride": 2}, ParallelLayout(1, 2, 2)), ({"stride": 2}, {"tp": 2}, ParallelLayout(2, 1))],
    ids=["lends", "takes back"],
)
def test_nor_does_it_on_the_way_of_a_schedule(before, entry, goal):
    """Memory is released between its two steps; the second one waits until it is there again."""
    rig, memory = Rig(1, 2, policy="schedule"), frozenset({"weights"})

    def follow(entry: dict) -> None:
        rig.coordinator.receive(m.SetSchedule(query_id=0, entries=[m.ScheduleEntry(**entry)]), 0.0)

    def ask(**effects) -> None:
        rig.control("update", True, takes_back=True, **effects)
        rig.settle()
        for rank in range(2):
            rig.world.answer(rank, "update")
        rig.settle()

    follow(before)
    rig.settle()
    follow(entry)
    ask(releases=memory)
    assert (rig.coordinator.layout, rig.coordinator._released) == (rig.config.base, memory)
    ask(resumes=memory)
    assert (rig.coordinator.layout, rig.coordinator._released) == (goal, frozenset())
    assert rig.coordinator._schedule.over


def test_the_answer_comes_when_the_memory_is_free():
    rig = Rig(1, 4)
    lend(rig)
    rig.iterate()
    rig.deliver()
    rig.iterate()
    outboxes = [rig.world.ranks[rank].outbox for rank in (1, 3)]
    given = [message for outbox in outboxes for message in outbox if isinstance(message, m.MemoryReleased)]
    for outbox, message in zip(outboxes, given, strict=True):
        outbox.remove(message)
    rig.settle()
    assert rig.coordinator.layout.lent == [1, 3] and not rig.answers()
    assert rig.work(1) == [0], "the others work meanwhile"
    rig.coordinator.handle_rank_message(given[0], 0.0)
    assert not rig.answers()
    rig.coordinator.handle_rank_message(m.MemoryReleased(rank=3, epoch=1, error="rank 3 keeps its memory: full"), 0.0)
    (answer,) = rig.answers()
    assert (answer.code, answer.message) == (500, "ranks are lent, but rank 3 keeps its memory: full")


def test_a_rank_that_is_ahead_reports_in_the_new_layout():
    """Leader 0 ends all requests and says so before rank 1 has said that it switched; ranks report on changes only."""
    rig = Rig(1, 2)
    rig.work(2)
    rig.settle()
    lend(rig)
    rig.iterate()
    rig.deliver()
    rig.iterate()
    while rig.world.ranks[0].requests:
        rig.world.finish(0)
    rig.world.iterate(0)
    rig.deliver(0)
    rig.deliver(1)
    assert rig.coordinator._in_engine == 0


def test_policies_see_the_ranks_that_work():
    rig = lent(policy="threshold", switch_at=1, degrees=(1, 2, 4))
    rig.work(2)
    rig.settle()
    snapshot, _ = rig.world.decisions[-1]
    assert (snapshot.num_ranks, snapshot.degrees, snapshot.tp) == (2, (1, 2), 1)


def test_siblings_find_their_prompt_where_it_was_taken_over():
    rig = Rig(1, 4)

    def send() -> int:
        before = len(rig.world.to_leaders)
        rig.serial += 1
        rig.coordinator.receive(Generation(obj=Request(rig.serial, "work"), tokens=9000, family=7), 0.0)
        ((rank, _),) = rig.world.to_leaders[before:]
        return rank

    rig.work(3)
    assert send() == 3
    rig.settle()
    lend(rig)
    rig.settle()
    assert send() == 2


@pytest.mark.parametrize(
    ("stride", "options", "says"),
    [
        (3, {}, r"stride=3: choose one of [2, 4] (--pat-candidates 1,2,4)"),
        (2, {"degrees": (1, 2)}, "--pat-candidates 1,2: no ranks can be lent; give 4 and a lower degree, too"),
        (2, {"weights": "reshard"}, "--pat-weights reshard: lent ranks would miss how weights move; start without it"),
    ],
)
def test_what_cannot_be_lent_is_refused_in_one_line(stride, options, says):
    rig = Rig(1, 4, **options)
    lend(rig, stride)
    (answer,) = rig.answers()
    assert (answer.code, answer.message) == (400, says)


def test_not_while_memory_is_released():
    rig = Rig(1, 4)
    rig.control("flush", releases=frozenset({"kv_cache"}))
    lend(rig)
    (answer,) = rig.answers()
    assert (answer.code, answer.message) == (409, "memory is released (kv_cache); resume it first")


def test_not_in_a_switch():
    rig = Rig(1, 4)
    rig.reconfigure(2)
    lend(rig, query_id=1)
    (answer,) = rig.answers()
    assert (answer.query_id, answer.code) == (1, 409)


# -- who says when -------------------------------------------------------------------------------------------------

TRAINING = Training(samples=8, complete=2, ready=500, seconds_per_token=1e-3)


def ask(rig: Rig) -> m.Reply:
    rig.coordinator.decide_lending(m.LendingQuery(query_id=7, training=TRAINING), 0.0)
    answer = rig.answers()[-1]
    assert answer.query_id == 7
    return answer


def test_the_lending_policy_is_shown_the_ranks_that_work():
    shown = []

    def lending(snapshot, history, training):
        shown.append(snapshot)
        assert history is rig.coordinator.history and training is TRAINING
        return LendingDecision(move=Move.LEND, gain=2.0, why="hides training", tp=1)

    rig = Rig(1, 4, lambda snapshot, history: Decision(tp=snapshot.tp), lending=lending, policy="pat", profile="p")
    rig.work(8)
    rig.settle()
    answer = ask(rig)
    assert (answer.code, answer.answer) == (200, {"move": "lend", "gain": 2.0, "why": "hides training", "tp": 1})
    lend(rig)
    rig.iterate()
    assert ask(rig).answer["why"] == "a switch is under way" and len(shown) == 1
    rig.settle()
    rig.finish(1)
    rig.settle()
    ask(rig)
    seen = [(one.num_ranks, one.requests, one.load.replica.tolist()) for one in shown]
    assert seen == [(4, 8, [0, 0, 1, 1, 2, 2, 3, 3]), (2, 6, [0] * 3 + [1] * 3)]


def make_roomy_rig(**options) -> Rig:
    """Eight requests on four ranks, with room for the KV of all on any of them."""
    rig = Rig(1, 4, policy="threshold", **options)
    rig.world.kv_totals = {1: 10**6, 2: 2 * 10**6, 4: 4 * 10**6}
    rig.work(8)
    rig.settle()
    return rig


def test_without_a_profile_the_room_for_kv_decides():
    """The policy that switches is not shown the requests one by one; the one that lends is."""
    rig = make_roomy_rig(degrees=(1, 2, 4))
    assert ask(rig).answer["why"] == "KV fits" and ask(rig).answer["move"] == "lend"


@pytest.mark.parametrize("options", [{}, {"degrees": (1, 2)}, {"degrees": (1, 2, 4), "weights": "reshard"}], ids=str)
def test_what_lend_ranks_always_refuses_is_never_asked_for(options):
    """The policy ``threshold`` without a profile leaves out tp=2, so only three of four ranks can be lent."""
    rig = make_roomy_rig(**options)
    found = ask(rig).answer
    lend(rig)
    refusal = rig.answers()[-1]
    assert (refusal.code, found["move"], found["why"]) == (400, "never", refusal.message)


OTHERS = {"engines": 1, "running": 1, "waiting": 0, "tokens": 1000, "room": 10**6, "delay": 0.0, "lent": 0.0}
SECONDS = ("seconds_per_token", "slowdown", "setup", "elapsed", "lent", "busy", "others.delay")
MOST = dict.fromkeys(SECONDS, 10**9) | {"others.running": 10**6, "others.waiting": 10**6, "others.lent": 1}
"""Most that is answered, of what is not a count."""


@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize(
    "field", sorted({*TRAINING.__struct_fields__, *(f"others.{one}" for one in OTHERS)} - {"returned", "others"})
)
def test_any_number_is_refused_or_answered(field, is_lent):
    """An exception would end the engine.  Floats hold integers of up to 308 digits."""
    predictor, costs = machine(crossing())
    lending = make_lending_policy(predictor, costs, 4, (1, 2, 4))
    rig = Rig(1, 4, keep_layout, predictor, lending, costs, policy="survival", profile="-", profile_as_is=True)
    rig.world.kv_totals = {1: 10**6, 2: 2 * 10**6, 4: 4 * 10**6}
    rig.work(8)
    rig.settle()
    if is_lent:
        lend(rig)
        rig.settle()
        rig.work(1)
        rig.settle()  # whoever leads now has said how much room there is
    bounds = []
    for number in (10**exponent for exponent in (0, 6, 9, 15, 16, 18, 19, 40, 308, 309, 400)):
        values = structs.asdict(TRAINING) | {"samples": max(8, number) if field == "complete" else 8}
        if field.startswith("others."):
            values |= {"complete": 8, "ready": 10**6, "others": OTHERS | {field.removeprefix("others."): number}}
        else:
            values[field] = number
        try:
            training = files.convert(values, Training)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 200
            continue
        bounds.append(number)
        rig.coordinator.decide_lending(m.LendingQuery(query_id=7, training=training), 0.0)
        answer = rig.answers()[-1]
        assert answer.code == 200 and math.isfinite(answer.answer["gain"])
    assert max(bounds) == MOST.get(field, 10**15), "and this is the most that is answered"


# -- leases --------------------------------------------------------------------------------------------------------


def borrow(rig: Rig, client: str = "trainer", seconds: float | None = LEASE_SECONDS, now: float = 0.0) -> None:
    query = m.LendRanks(query_id=50, stride=2, client=client, lease_seconds=seconds)
    rig.coordinator.lend_ranks(query, now)
    rig.settle()


def pass_time(rig: Rig, until: float, since: float = 0.0) -> None:
    """A look every 10 s, as the coordinator looks by itself; ranks report once in any case."""
    rig.finish(0)
    rig.settle()
    for now in range(int(since), int(until) + 1, 10):
        rig.coordinator.handle_timer(now)
        rig.settle()


def begin_round(rig: Rig, name: str, now: float) -> None:
    rig.coordinator.handle_round(m.BeginRound(name=name, requests=4, lease_seconds=LEASE_SECONDS), now)
    rig.settle()


def test_the_ranks_of_a_client_that_died_come_back_for_the_next_round():
    rig = Rig(1, 4)
    borrow(rig)
    begin_round(rig, "other", LEASE_SECONDS - 1)
    assert rig.coordinator.layout.lent == [1, 3], "the lease holds"
    pass_time(rig, LEASE_SECONDS, since=LEASE_SECONDS)
    assert rig.coordinator.layout.lent == []
    assert switches(rig)[-1] == (1, 1, [], "lease over")
    assert sorted(rig.work(4, now=LEASE_SECONDS)) == [0, 1, 2, 3]


def test_and_for_a_request_that_no_round_was_announced_for():
    rig = Rig(1, 4)
    borrow(rig)
    pass_time(rig, 2 * LEASE_SECONDS)
    assert rig.coordinator.layout.lent == [1, 3], "nobody wants them"
    rig.work(1, now=2 * LEASE_SECONDS)
    rig.settle()
    assert rig.coordinator.layout.lent == []


def test_requests_of_others_do_not_renew_its_lease():
    """Requests of another round do not, nor those that nobody can attribute, as its own round has all of its own."""
    rig = Rig(1, 4)
    rig.coordinator.handle_round(m.BeginRound(name="trainer", requests=1), 0.0)
    rig.work(1)
    rig.settle()
    borrow(rig)
    rig.finish_all()
    rig.work(3, now=100.0)
    rig.settle()
    pass_time(rig, LEASE_SECONDS + 100)
    assert rig.coordinator.layout.lent == []


@pytest.mark.parametrize("sign", ["asks", "lends again", "cannot take back", "begins a round", "a request", "works"])
def test_whoever_lends_keeps_its_ranks_as_long_as_it_is_heard_of(sign):
    rig = Rig(1, 4)
    rig.coordinator.handle_round(m.BeginRound(name="trainer", requests=2), 0.0)
    if sign == "works":
        rig.work(1)
    borrow(rig)
    begin_round(rig, "other", 0.0)
    for now in range(500, 3000, 500):
        if sign == "asks":
            rig.coordinator.decide_lending(m.LendingQuery(query_id=7, training=TRAINING, client="trainer"), now)
        elif sign == "lends again":
            borrow(rig, now=now)
        elif sign == "cannot take back":
            query = m.LendRanks(query_id=9, stride=1, client="trainer")
            rig.coordinator.lend_ranks(query, now)
            rig.settle(fate="abort")
        elif sign == "begins a round":
            begin_round(rig, "trainer", now)
        elif sign == "a request":
            request = Generation(obj=Request(1000 + now, "work"), tokens=1, round="trainer")
            rig.coordinator.receive(request, now)
            rig.settle()
            rig.finish_all()
        pass_time(rig, now + 490, since=now)
        assert rig.coordinator.layout.lent == [1, 3]
    rig.finish_all()
    pass_time(rig, 4000, since=3000)
    begin_round(rig, "other", 4000.0)
    assert rig.coordinator.layout.lent == []


def test_the_client_says_how_long_its_lease_is_and_the_program_of_the_engine_needs_none():
    for seconds, left in ((3600.0, 3500.0), (None, None)):
        rig = Rig(1, 4)
        borrow(rig, seconds=seconds)
        rig.coordinator.handle_status_query(m.StatusQuery(query_id=3), 100.0)
        lease = {"client": "trainer", "seconds": seconds, "left": left}
        assert rig.world.server[-1].answer["lease"] == lease
        begin_round(rig, "other", 3500.0)
        assert rig.coordinator.layout.lent == [1, 3]
    begin_round(rig, "other", 1e9)
    assert rig.coordinator.layout.lent == [1, 3]


def test_what_could_not_be_lent_has_no_lease():
    rig = Rig(1, 4)
    rig.coordinator.lend_ranks(m.LendRanks(query_id=50, stride=2, lease_seconds=5.0), 0.0)
    rig.settle(fate="abort")
    assert rig.coordinator._switching._lease is None
    borrow(rig)
    lend(rig, stride=1)
    rig.settle()
    assert rig.coordinator._switching._lease is None


def test_ranks_are_lent_to_one_client():
    rig = Rig(1, 4)
    borrow(rig)
    borrow(rig, client="other", now=10.0)
    refused = rig.answers()[-1]
    assert (refused.code, refused.message) == (409, "ranks are lent to trainer; take them back first")
    borrow(rig, client="other", now=LEASE_SECONDS)
    rig.coordinator.handle_status_query(m.StatusQuery(query_id=3), LEASE_SECONDS)
    assert rig.world.server[-1].answer["lease"]["client"] == "other"


def test_a_trainer_that_still_has_the_memory_keeps_it_and_the_engine_asks_now_and_then():
    """A rank cannot prepare without its memory."""
    rig = Rig(1, 4)
    borrow(rig)
    begin_round(rig, "other", LEASE_SECONDS - 1)
    tries = []
    for now in range(int(LEASE_SECONDS), int(LEASE_SECONDS + 3 * RETRY_SECONDS), 10):
        before = len(rig.world.records)
        rig.coordinator.handle_timer(now)
        rig.settle(fate="abort")
        tries += [now - LEASE_SECONDS] * (len(rig.world.records) - before)
    assert tries == [0, RETRY_SECONDS, 2 * RETRY_SECONDS] and rig.coordinator.layout.lent == [1, 3]
    assert rig.work(2, now=LEASE_SECONDS) == [0, 2], "the others work meanwhile"
    rig.coordinator.handle_timer(LEASE_SECONDS + 3 * RETRY_SECONDS)
    rig.settle()
    assert rig.coordinator.layout.lent == []
