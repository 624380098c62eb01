"""Routing: the running sums behind it against what they stand for, and what a burst costs."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.replicas import REMEMBERED, Generation, Leader, PrefixPlaces
from sglang_pat.coordinator.router import Coordinator
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.prompts import LONG_PROMPT, compute_allowed_lead

from .drawn import examples
from .lines_run import lines_run

pytestmark = pytest.mark.unit


def report(rank: int, received: int, running: int, waiting: int, tokens: int, tp: int = 1) -> m.LoadReport:
    return m.LoadReport(
        rank=rank, tp=tp, received=received, running=running, waiting=waiting, tokens=tokens, kv_used=0, kv_total=0,
        retracted=0, weight_updates=0, requests=[m.Running(1, 1, 1, 1)] * (running + waiting),
    )  # fmt: skip


class Recomputed:
    """A leader's load by its definition, from everything that was ever sent and reported."""

    def __init__(self) -> None:
        self.sent: list[Generation] = []
        self.report: m.LoadReport | None = None

    @property
    def cost(self) -> tuple[int, int]:
        received = self.report.received if self.report else 0
        there = self.report.running + self.report.waiting if self.report else 0
        tokens = self.report.tokens if self.report else 0
        on_the_way = self.sent[received:]
        return there + len(on_the_way), tokens + sum(work.tokens for work in on_the_way)


class Chosen:
    """An outbox that keeps where requests go."""

    def __init__(self) -> None:
        self.ranks: deque[int] = deque()

    def send_to_leader(self, rank: int, obj) -> None:
        self.ranks.append(rank)

    def send_to_server(self, obj) -> None:
        self.answer = obj

    def start_counting_requests(self) -> None: ...

    def record_steps(self, counts: m.StepCounts) -> None: ...

    def log_decision(self, snapshot, decision) -> None:
        self.requests = snapshot.requests


events = st.lists(
    st.one_of(
        st.integers(0, 5000),
        st.tuples(st.integers(0, 7), st.floats(0, 1), st.integers(0, 40), st.integers(0, 40), st.integers(0, 99999)),
    ),
    max_size=120,
)


@examples(300)
@given(leaders=st.integers(1, 8), events=events)
def test_requests_go_where_the_recomputed_load_is_least(leaders: int, events: list):
    """An event is a request of so many tokens, or a leader's report that it has taken a share of what was sent."""
    chosen = Chosen()
    core = Coordinator(AdaptiveConfig(base=ParallelLayout(1, leaders), policy="off"), chosen)
    reference = [Recomputed() for _ in range(leaders)]
    for event in events:
        if isinstance(event, int):
            work = Generation(obj=None, tokens=event)
            expected = min(range(leaders), key=lambda rank: reference[rank].cost)
            core.receive(work, 0.0)
            assert chosen.ranks.pop() == expected
            reference[expected].sent.append(work)
        else:
            rank, share, running, waiting, tokens = event
            rank %= leaders
            before = reference[rank].report.received if reference[rank].report else 0
            received = before + int(share * (len(reference[rank].sent) - before))
            reference[rank].report = report(rank, received, running, waiting, tokens)
            core.handle_rank_message(reference[rank].report, 0.0)
        assert [core._leaders[rank].cost for rank in range(leaders)] == [one.cost for one in reference]
        assert core._in_engine == chosen.requests == sum(one.cost[0] for one in reference)


def test_a_request_costs_the_same_however_many_are_on_their_way():
    core = Coordinator(AdaptiveConfig(base=ParallelLayout(1, 8), policy="threshold"), Chosen())

    def receive():
        core.receive(Generation(obj=None, tokens=7), 0.0)

    receive()
    first, _ = lines_run(receive)
    for _ in range(2000):
        receive()
    assert lines_run(receive)[0] <= first + 10


def place_requests(requests: list[Generation], response: float, dp: int = 4) -> list[int]:
    """Where requests go that come one after another and stay."""
    layout, leaders, places = ParallelLayout(1, dp), {rank: Leader() for rank in range(dp)}, PrefixPlaces()
    result = []
    for request in requests:
        result.append(places.choose(request, layout, leaders, response))
        leaders[result[-1]].send(request)
    return result


def groups(number: int, size: int, tokens: int = 8192) -> list[Generation]:
    return [Generation(obj=None, tokens=tokens, family=family) for family in range(number) for _ in range(size)]


def test_siblings_of_a_long_prompt_go_to_one_replica():
    """Where responses are short: eight siblings are computed once, and in the end all replicas are equally full."""
    ranks = place_requests(groups(8, 8), response=250)
    assert ranks == [rank for rank in (0, 1, 2, 3) * 2 for _ in range(8)]


@examples(200)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([100, LONG_PROMPT, 8192, 30000])), max_size=100),
    st.floats(0, 1e4),
)
def test_no_replica_is_much_fuller_for_a_prompt(given_requests, response):
    requests = [Generation(obj=None, tokens=n, family=f if n >= LONG_PROMPT else None) for f, n in given_requests]
    load = [0] * 4
    for request, rank in zip(requests, place_requests(requests, response), strict=True):
        assert load[rank] - min(load) <= compute_allowed_lead(request.tokens, response)
        load[rank] += 1


def test_a_merged_replica_has_the_prompts_of_its_parts():
    places, request = PrefixPlaces(), groups(1, 1)[0]
    leaders = {rank: Leader() for rank in range(4)}
    for rank in (0, 1, 2):
        leaders[rank].send(request)
    assert places.choose(request, ParallelLayout(1, 4), leaders, 250) == 3
    leaders[1].send(request)
    assert places.choose(request, ParallelLayout(2, 2), leaders, 250) == 1, "ranks 1 and 3 are one replica now"


def test_the_prompts_that_were_sent_last_are_remembered():
    places, leaders = PrefixPlaces(), {rank: Leader() for rank in range(2)}
    for request in groups(REMEMBERED + 5, 1):
        places.choose(request, ParallelLayout(1, 2), leaders, 250)
    assert list(places._last) == list(range(5, REMEMBERED + 5))


def test_the_coordinator_routes_by_the_lengths_seen():
    """The first guess is an eighth of the limit, here 2,048 tokens: too long for a prompt to matter."""
    chosen = Chosen()
    core = Coordinator(AdaptiveConfig(base=ParallelLayout(1, 4), policy="off"), chosen)
    siblings = [Generation(obj=None, tokens=8192, family=7, limit=16384)] * 4
    for request in siblings:
        core.receive(request, 0.0)
    for family in range(100):
        core.history.observe(200, family)
    for request in siblings:
        core.receive(request, 0.0)
    assert list(chosen.ranks) == [0, 1, 2, 3] + [3] * 4


def test_a_leader_knows_its_requests_one_by_one():
    """Right after a switch its account says only how many they are."""
    leader = Leader()
    leader.apply_report(report(0, 0, 2, 1, 5))
    assert leader.known
    leader.apply_report(m.LoadReport(rank=0, tp=1, received=0, running=2, waiting=0, tokens=5, kv_used=5, kv_total=9,
                              retracted=0, weight_updates=0))  # fmt: skip
    assert not leader.known
