"""The coordinator against ranks that behave like the real ones, in every interleaving hypothesis finds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_pat import messages as m
from sglang_pat.config import AdaptiveConfig
from sglang_pat.coordinator.replicas import Generation
from sglang_pat.coordinator.router import Coordinator
from sglang_pat.layout import ParallelLayout, list_strides
from sglang_pat.policies.rules import RETRY_SECONDS, SETTLE_SECONDS
from sglang_pat.policies.threshold import make_threshold_policy

from .coordinator_world import REPLIES, Merged, OutOfBand, Refused, Request, World, control, deliver
from .drawn import examples

pytestmark = pytest.mark.unit

RANK = st.integers(0, 3)
FATE = st.sampled_from(["fine", "fine", "fine", "prepare", "abort"])
"""The fate of the next switch that is prepared."""


class CoordinatorMachine(RuleBasedStateMachine):
    @initialize(
        base=st.sampled_from([(1, 2), (1, 4), (2, 2)]),
        policy=st.sampled_from(["threshold", "survival", "manual", "off"]),
        switch_at=st.integers(1, 4),
    )
    def start(self, base, policy, switch_at):
        # One that predicts is asked less often, and is told of every request; what it answers does not matter here.
        self.config = AdaptiveConfig(base=ParallelLayout(*base), policy=policy, switch_at=switch_at, profile="-")
        self.world = World(self.config)
        decide = make_threshold_policy(switch_at) if self.config.predicts else None
        self.coordinator = Coordinator(self.config, self.world, decide)
        self.now = 100.0
        self.serial = 0
        self.work: list[int] = []
        self.expected: list[int] = []
        self.queries: dict[int, dict[str, Any]] = {}
        self.out_of_band = 0

    def _next(self) -> int:
        self.serial += 1
        return self.serial

    # -- the server ---------------------------------------------------------------------------

    @rule(tokens=st.integers(0, 50), many=st.integers(1, 4))
    def request(self, tokens, many):
        for _ in range(many):
            serial = self._next()
            self.work.append(serial)
            self.coordinator.receive(Generation(obj=Request(serial, "work"), tokens=tokens), self.now)

    @rule(kind=st.sampled_from(["flush", "update", "abort"]))
    def control(self, kind):
        serial = self._next()
        if kind in REPLIES:
            self.expected.append(serial)
        self.coordinator.receive(control(serial, kind), self.now)

    @rule(kind=st.sampled_from(["flush", "update"]), takes_back=st.booleans())
    def control_in_base(self, kind, takes_back):
        serial = self._next()
        self.world.needs_base.add(serial)
        self.expected.append(serial)
        self.coordinator.receive(control(serial, kind, True, takes_back), self.now)

    @rule(pauses=st.booleans())
    def pause(self, pauses):
        """A pause or its end: ranks take it in turn, and switch in it."""
        self.coordinator.receive(replace(control(self._next(), "pause"), pauses=pauses), self.now)

    @rule(which=st.integers(0, 2))
    def reconfigure_to_a_candidate(self, which):
        self.reconfigure(self.config.layouts[which % len(self.config.layouts)].tp)

    @rule(tp=st.sampled_from([0, 1, 2, 3, 4, 8]))
    def reconfigure(self, tp):
        query = len(self.queries)
        allowed = tp in self.config.list_degrees(self.world.known.stride)
        busy = self.world.preparing is not None
        self.queries[query] = dict(tp=tp, allowed=allowed, busy=busy, here=tp == self.world.known.tp)
        self.coordinator.reconfigure(m.Reconfigure(query_id=query, tp=tp), self.now)

    @rule(which=st.integers(0, 2))
    def lend(self, which):
        strides = [1, *list_strides(self.config.layouts)]
        self.lend_with(strides[which % len(strides)])

    @rule(stride=st.sampled_from([0, 1, 2, 3, 4, 8]), lease=st.sampled_from([None, 1.0]))
    def lend_with(self, stride, lease=None):
        query = len(self.queries)
        allowed = stride == 1 or stride in list_strides(self.config.layouts)
        busy, here = self.world.preparing is not None, stride == self.world.known.stride
        self.queries[query] = dict(stride=stride, allowed=allowed, busy=busy, here=here)
        self.coordinator.lend_ranks(m.LendRanks(query_id=query, stride=stride, lease_seconds=lease), self.now)

    @rule(name=st.sampled_from("ab"), requests=st.sampled_from([None, 1, 5]), retracted=st.integers(0, 9))
    def round_begins(self, name, requests, retracted):
        """The next report says that so many were retracted."""
        self.world.retracted = retracted
        self.coordinator.handle_round(m.BeginRound(name=name, requests=requests), self.now)

    @rule(name=st.sampled_from("ab"))
    def round_ends(self, name):
        self.coordinator.handle_round(m.EndRound(name=name), self.now)

    @rule()
    def status(self):
        self.coordinator.handle_status_query(m.StatusQuery(query_id=7), self.now)
        reply = self.world.server.pop()
        assert reply.query_id == 7
        known = self.world.known
        assert reply.answer["layout"] == known.as_dict() and reply.answer["lent"] == known.lent
        assert reply.answer["switching"] == (self.world.preparing is not None)
        assert [group["ranks"] for group in reply.answer["groups"]] == [known.group(leader) for leader in known.working]
        assert all(group["in_flight"] >= 0 for group in reply.answer["groups"])
        assert reply.answer["num_switches"] == sum(not record.error for record in self.world.records)

    @rule(seconds=st.sampled_from([0.0, 0.1, SETTLE_SECONDS, RETRY_SECONDS]))
    def tick(self, seconds):
        self.now += seconds
        self.coordinator.handle_timer(self.now)

    # -- the ranks ----------------------------------------------------------------------------

    @rule(grammatical=st.booleans())
    def grammars(self, grammatical):
        self.world.grammatical = grammatical

    @rule(fate=st.sampled_from(["fine", "prepare", "abort"]))
    def way_home(self, fate):
        self.world.way_home = fate

    @rule(number=RANK, action=st.sampled_from(["iterate", "deliver", "finish", *REPLIES]), fate=FATE)
    def step(self, number, action, fate):
        self._act(number, action, fate)

    @rule(seed=st.integers(0, 2**32 - 1), actions=st.sampled_from([10, 30, 90]), fate=FATE)
    def bustle(self, seed, actions, fate):
        """Many steps of random ranks: what moves a switch along."""
        rng = random.Random(seed)
        for _ in range(actions):
            action = rng.choices(["iterate", "deliver", "finish", *REPLIES], [4, 6, 1, 1, 1])[0]
            self._act(rng.randrange(4), action, fate)

    @rule(fate=FATE)
    def calm(self, fate):
        """Everything on its way arrives; nothing finishes."""
        for _ in range(10):
            for number in range(self.config.num_ranks):
                for action in ("iterate", "deliver", *REPLIES):
                    self._act(number, action, fate)

    @rule(keep=st.integers(0, 2))
    def batch_drains(self, keep):
        for number, rank in enumerate(self.world.ranks):
            while len(rank.requests) > keep and not rank.switching:
                self.world.finish(number)

    def _act(self, number: int, action: str, fate: str) -> None:
        number %= self.config.num_ranks
        rank = self.world.ranks[number]
        if action == "iterate":
            self.world.iterate(number, (fate, number))
        elif action == "finish":
            self.world.finish(number)
        elif action in REPLIES:
            self.world.answer(number, action)
        elif rank.outbox:
            deliver(self.coordinator, rank, self.now)

    @precondition(lambda self: self.world.known == self.world.layout)
    @rule(number=RANK)
    def load_report(self, number):
        leader = number % self.world.layout.dp
        if not self.world.ranks[leader].switching:
            self.world.report(leader)

    @rule(number=RANK)
    def out_of_band_message(self, number):
        self.out_of_band += 1
        self.world.ranks[number % self.world.layout.dp].outbox.append(OutOfBand(number))

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def every_work_is_in_one_place(self):
        if not hasattr(self, "world"):
            return
        backlog = [event.obj.serial for event in self.coordinator._backlog if isinstance(event, Generation)]
        there = [r.serial for rank in self.world.ranks for r in rank.requests]
        coming = [
            obj.serial
            for rank in self.world.ranks
            for obj in rank.inbox
            if isinstance(obj, Request) and obj.kind == "work"
        ]
        done = [request.serial for request in self.world.finished]
        assert sorted(backlog + there + coming + done) == self.work
        sent = Counter(obj.serial for _, obj in self.world.to_leaders if getattr(obj, "kind", "") == "work")
        assert set(sent.values()) <= {1}

    @invariant()
    def arrivals_account_for_every_request(self):
        if hasattr(self, "world"):
            arrivals = self.coordinator._decisions.round
            assert 0 <= arrivals._left <= self.coordinator._in_engine
            assert self.coordinator._in_engine - arrivals._left <= arrivals.peak <= arrivals.came
            assert 0 <= arrivals.missing <= sum(round_.requests or 0 for round_ in arrivals.open.values())

    def teardown(self):
        if hasattr(self, "world"):
            for name in "ab":
                self.coordinator.handle_round(m.EndRound(name=name), self.now)
            self.pause(pauses=False)
            self.world.way_home = "fine"
            self.drain()

    def drain(self) -> None:
        """Let everything go its way: nothing may be left over."""
        for _ in range(200):
            before = (len(self.world.to_leaders), len(self.world.server), len(self.world.finished))
            for rank in self.world.ranks:
                while rank.outbox:
                    deliver(self.coordinator, rank, self.now)
                self.world.iterate(rank.rank)
                for kind in REPLIES:
                    self.world.answer(rank.rank, kind)
                self.world.finish(rank.rank)
            self.now += RETRY_SECONDS
            self.coordinator.handle_timer(self.now)
            busy = any(rank.outbox or rank.inbox for rank in self.world.ranks) or self.world.preparing
            after = (len(self.world.to_leaders), len(self.world.server), len(self.world.finished))
            if before == after and not busy:
                break
        assert not self.world.outstanding and self.world.preparing is None
        assert not self.coordinator._backlog and not len(self.coordinator._replies)
        assert sorted(r.serial for r in self.world.finished) == self.work
        assert self.coordinator._in_engine == 0, "the load is known, though reported on changes only"
        assert self.coordinator.layout == self.world.layout == self.world.known
        if self.config.policy != "manual":
            assert self.world.layout.tp == self.config.base.tp
        answered = [obj.serial for obj in self.world.server if isinstance(obj, (Merged, Refused))]
        assert sorted(answered) == self.expected, "each control request has one reply"
        assert sum(isinstance(obj, OutOfBand) for obj in self.world.server) == self.out_of_band
        assert not any(isinstance(obj, tuple(REPLIES.values())) for obj in self.world.server)
        self.check_queries()

    def check_queries(self) -> None:
        answers = [obj for obj in self.world.server if isinstance(obj, m.Reply)]
        assert sorted(answer.query_id for answer in answers) == list(self.queries)
        by_epoch = {record.epoch: record for record in self.world.records}
        for answer in answers:
            query = self.queries[answer.query_id]
            if not query["allowed"]:
                name, wrong = next(iter(query.items()))
                assert answer.code == 400 and f"{name}={wrong}" in answer.message
            elif query["busy"]:
                assert answer.code == 409
            elif query["here"]:
                assert (answer.code, answer.answer) == (200, None)
            else:
                record = by_epoch[answer.answer["epoch"]]
                self.check_record(record, query)
                assert answer.code == (500 if record.error else 200) and answer.message == record.error
        assert sum(record.reason == "request" for record in self.world.records) == sum(
            answer.answer is not None and "tp" in self.queries[answer.query_id] for answer in answers
        )

    def check_record(self, record: m.SwitchRecord, query: dict[str, Any]) -> None:
        if "tp" in query:
            assert record.reason == "request" and record.to_tp == query["tp"]
        else:
            assert record.reason in ("lend", "take back")
            lent = [rank for rank in range(self.config.num_ranks) if rank % query["stride"]]
            assert record.error or record.lent == lent


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(examples(250), stateful_step_count=60)
