"""The admitter in large rounds: the same decisions as by its definitions, and the same cost however large they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Judge, Key, Launch, More, Output, Return, RoundOver, SampleId, Span
from sglang_pat.rollout.rules import Rules
from tests.unit.for_each import for_each

from .admission_scanning import ScanningAdmitter
from .admission_world import dumps, loads
from .lines_run import lines_run

pytestmark = pytest.mark.unit

MODES = ("strict", "reorder", "partial")


def plain(value: Any) -> Any:
    """With what comes at the end of ``owed`` left out, which is 0."""
    value = msgspec.to_builtins(value)
    round_ = value.get("round") if isinstance(value, dict) else None
    while round_ and round_["owed"] and not round_["owed"][-1]:
        round_["owed"].pop()
    return value


class Sliced:
    """An admitter that does what is to be done in slices, all of them before it is told anything else."""

    def __init__(self, admitter: Admitter, most: int) -> None:
        self.admitter, self._most = admitter, most

    def tell(self, what: str, *arguments: Any) -> list:
        """As of one that does it at once."""
        about = {"most": self._most} if what == "begin" else {}
        actions = getattr(self.admitter, what)(*arguments, **about) or []
        while self.admitter.more:
            actions += self.admitter.go_on()
        return actions


class Both:
    """The admitter and the scanning one, told the same; both must answer the same.  So must one that works in slices.

    ``most``: of a slice.
    """

    def __init__(self, rules: Rules, most: int) -> None:
        self.one, self.other, self._most = Admitter(rules), ScanningAdmitter(rules), most
        self.sliced = Sliced(Admitter(rules), most)
        self.running: list[SampleId] = []
        self.judging: list[Key] = []
        self.asked = 0

    def tell(self, what: str, *arguments: Any) -> None:
        answers = []
        for tell in (self._tells(self.one), self._tells(self.other), self.sliced.tell):
            # Each its own outputs: they are kept, and added to.
            given = [msgspec.convert(msgspec.to_builtins(a), Output) if isinstance(a, Output) else a for a in arguments]
            try:
                answers.append(tell(what, *given))
            except ValueError as error:
                answers.append([str(error)])
        assert plain(answers[0]) == plain(answers[1]) == plain(answers[2])
        assert plain(self.one.state) == plain(self.other.state) == plain(self.sliced.admitter.state)
        assert self.one.wanted == self.other.wanted
        for action in answers[0]:
            if isinstance(action, Launch):
                self.running.append(action.sample)
            elif isinstance(action, Judge):
                self.judging.append(action.group.key)
            elif isinstance(action, More):
                self.asked += action.prompts
            elif isinstance(action, RoundOver):
                assert not self.running
                self.judging, self.asked = [], 0

    @staticmethod
    def _tells(admitter: Admitter) -> Callable[..., list]:
        return lambda what, *given: getattr(admitter, what)(*given) or []

    def restore(self) -> None:
        self.sliced = Sliced(loads(dumps(self.sliced.admitter)), self._most)
        self.one = loads(dumps(self.one))
        state = msgspec.json.decode(msgspec.json.encode(self.other.state), type=type(self.other.state))
        self.other = ScanningAdmitter(self.other.rules, state)


def anything(seed: int, prompts: int, responses: int, events: int) -> None:
    """Events in random order, in rounds of up to so many prompts."""
    rng = random.Random(seed)
    bound, mode = rng.randint(0, 4), MODES[seed % 3]
    both = Both(
        Rules(
            mode=mode, unbiased=mode == "strict" and rng.random() < 0.5,
            num_prompts=rng.randint(1, prompts), num_responses=rng.randint(1, responses),
            eta_prompts=rng.choice([1.0, 1.25, 1.5, 2.5]), max_deferrals=bound, max_staleness=rng.randint(0, 4),
            filter_groups=rng.random() < 0.4,
        ),
        most=rng.choice([1, 2, 5]),
    )  # fmt: skip
    version = fed = 0
    for _ in range(events):
        chance, version_now = rng.random(), both.one.state.version
        if both.one.state.round is None and chance < 0.6:
            version += rng.choice([0, 1, 1, 1, 2, 3])
            both.tell("begin", version)
        elif chance < (0.8 if both.one.state.round is None else 0.01):
            count = rng.randint(1, 2 * prompts)
            both.tell("feed", [((0, index), index) for index in range(fed, fed + count)])
            fed += count
        elif both.asked and chance < 0.3:
            # Not always at once, and not always as many.
            count = rng.randint(0, both.asked)
            both.asked = 0
            both.tell("feed", [((0, index), index) for index in range(fed, fed + count)])
            fed += count
            if rng.random() < 0.5:
                both.tell("no_more")
        elif chance < 0.015:
            both.tell("cancel")
        elif chance < 0.02:
            both.restore()
        elif both.judging and (chance < 0.2 or not both.running):
            both.tell("judged", both.judging.pop(rng.randrange(len(both.judging))), rng.random() < 0.6)
        elif both.running:
            # Now the oldest, now any: rounds get on, and out of order.
            sample = both.running.pop(0 if rng.random() < 0.5 else rng.randrange(len(both.running)))
            tokens = rng.randint(1, 30)
            output = Output(spans=[Span(version_now, tokens)], finish_reason="stop" if rng.random() < 0.85 else "")
            both.tell("finished" if output.finish_reason else "stopped", sample, output)


@for_each([(seed,) for seed in range(90)])
def test_decisions_are_those_of_the_definitions(seed: int):
    anything(seed, prompts=5, responses=3, events=250)


@pytest.mark.parametrize("seed", range(6))
def test_in_larger_rounds_as_well(seed: int):
    anything(1000 + seed, prompts=40, responses=6, events=700)


def lines_of_events(mode: str, prompts: int) -> int:
    """Of the costliest of the events in the middle of a round's samples."""
    admitter = Admitter(Rules(mode=mode, num_prompts=prompts, num_responses=4, eta_responses=1.0))
    admitter.feed([((0, index), None) for index in range(6 * prompts)])
    running: list[SampleId] = []
    version = worst = 0
    for version in range(2):
        actions = admitter.begin(version)
        count = 0
        while True:
            running += [action.sample for action in actions if isinstance(action, Launch)]
            if any(isinstance(action, RoundOver) for action in actions):
                break
            # Of two samples that run, one from each end: groups are completed at any time.
            sample = running.pop(0 if count % 2 else -1)
            output = Output(spans=[Span(version, 5)], finish_reason="stop")
            lines, actions = lines_run(lambda s=sample, o=output: admitter.finished(s, o))
            count += 1
            if not admitter.state.round or admitter.state.round.stopping:
                actions += admitter.engine_lost()
                break
            worst = max(worst, lines)
        running = []
    return worst


@pytest.mark.parametrize("mode", MODES)
def test_an_event_costs_the_same_in_a_round_of_any_size(mode: str):
    assert lines_of_events(mode, 64) <= lines_of_events(mode, 8) + 40


@pytest.mark.parametrize("mode", MODES)
def test_a_round_that_is_begun_in_slices_starts_the_same_samples(mode: str):
    whole, sliced = (Admitter(Rules(mode=mode, num_prompts=20, num_responses=3)) for _ in range(2))
    for admitter in (whole, sliced):
        admitter.feed([((0, index), None) for index in range(100)])
    expected = whole.begin(0)
    found, slices = sliced.begin(0, most=7), 1
    while sliced.more:
        more = sliced.go_on()
        assert len(more) <= 7
        found, slices = found + more, slices + 1
    assert plain(found) == plain(expected)
    assert slices >= len(expected) // 7
    assert plain(sliced.state) == plain(whole.state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cancelled", [False, True])
def test_no_call_does_more_than_a_slice(mode: str, cancelled: bool):
    """Of what is returned, started, stopped and taken back; each a group more at most."""
    most, responses = 4, 3
    admitter = Admitter(Rules(mode=mode, num_prompts=30, num_responses=responses, eta_responses=1.0, max_deferrals=6))
    admitter.feed([((0, index), None) for index in range(300)])
    running: list[SampleId] = []
    largest = version = 0

    def told(actions: list) -> bool:
        nonlocal largest
        back = before - len(admitter.state.round.groups) if admitter.state.round and cancelled else 0
        worth = [responses if isinstance(action, Return) else not isinstance(action, RoundOver) for action in actions]
        largest = max(largest, sum(worth), back)
        running.extend(action.sample for action in actions if isinstance(action, Launch))
        return any(isinstance(action, RoundOver) for action in actions)

    for version in range(4):
        before = 0
        over, events = told(admitter.begin(version, most)), 0
        while not over:
            before = len(admitter.state.round.groups)
            if admitter.more:
                over = told(admitter.go_on())
            elif cancelled and events == 40:
                over = told(admitter.cancel())
            else:
                # Every other one of those that are there: many groups are half done at the end.
                sample = running.pop(0 if events % 2 else len(running) // 2)
                stops = admitter.state.round.stopping
                output = Output(spans=[Span(version, 5)], finish_reason="" if stops else "stop")
                over = told((admitter.stopped if stops else admitter.finished)(sample, output))
            events += 1
    assert version == 3 and not running
    assert largest <= 2 * (most + responses), "the last returns, and the first that are started or stopped"


def test_a_round_leaves_earlier_states_as_they_were():
    """It shares their groups, and copies those that it changes."""
    admitter = Admitter(Rules(mode="partial", num_prompts=8, num_responses=3, eta_prompts=2.0, max_staleness=9))
    admitter.feed([((0, index), None) for index in range(300)])
    rng, kept = random.Random(7), []
    for version in range(6):
        kept.append((admitter.snapshot(), msgspec.json.encode(admitter.state)))
        shared = {group.order: group for group in admitter.state.waiting}
        running = [action.sample for action in admitter.begin(version, most=1) if isinstance(action, Launch)]
        now = {group.order: group for group in admitter.state.round.groups}
        assert sum(now[order] is group for order, group in shared.items() if order in now) >= len(shared) - 2
        while admitter.state.round is not None:
            actions = admitter.go_on()
            if not admitter.more and running:
                sample = running.pop(rng.randrange(len(running)))
                ends = not admitter.state.round.stopping
                output = Output(spans=[Span(version, 5)], finish_reason="stop" if ends else "")
                actions += (admitter.finished if ends else admitter.stopped)(sample, output)
            running += [action.sample for action in actions if isinstance(action, Launch)]
    assert sum(len(state.waiting) for state, _ in kept) > 20
    assert all(msgspec.json.encode(state) == data for state, data in kept)


def test_a_round_in_slices_goes_on_although_all_that_was_started_has_ended():
    admitter = Admitter(Rules(mode="strict", num_prompts=4, num_responses=2, eta_responses=1.0))
    admitter.feed([((0, index), None) for index in range(20)])
    actions, returned = admitter.begin(0, most=1), 0
    while not any(isinstance(action, RoundOver) for action in actions):
        (sample,) = [action.sample for action in actions if isinstance(action, Launch)]
        actions = admitter.finished(sample, Output(spans=[Span(0, 1)], finish_reason="stop"))
        returned += 1
    assert returned == 8
