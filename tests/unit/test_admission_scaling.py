"""The admitter in large rounds: the same decisions as by its definitions, and the same cost however large they are."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Judge, Launch, NeedPrompts, Output, PromptKey, RoundOver, SampleId, Span
from sglang_pat.rollout.rules import Rules
from tests.unit.for_each import for_each

from .admission_scanning import ScanningAdmitter
from .drawn import fewer
from .lines_run import lines_run

pytestmark = pytest.mark.unit

MODES = ("strict", "reorder", "partial")


def plain(value: Any) -> Any:
    """The value as plain types, without the zeros at the end of ``owed``."""
    value = msgspec.to_builtins(value)
    round_ = value.get("round") if isinstance(value, dict) else None
    while round_ and round_["owed"] and not round_["owed"][-1]:
        round_["owed"].pop()
    return value


class Both:
    """The admitter and the scanning one, told the same; both must answer the same."""

    def __init__(self, rules: Rules) -> None:
        self.one, self.other = Admitter(rules), ScanningAdmitter(rules)
        self.running: list[SampleId] = []
        self.judging: list[PromptKey] = []
        self.asked = 0

    def tell(self, what: str, *arguments: Any) -> None:
        answers = []
        for admitter in (self.one, self.other):
            # Each its own outputs: they are kept, and added to.
            given = [msgspec.convert(msgspec.to_builtins(a), Output) if isinstance(a, Output) else a for a in arguments]
            try:
                answers.append(getattr(admitter, what)(*given))
            except ValueError as error:
                answers.append([str(error)])
        assert plain(answers[0]) == plain(answers[1])
        assert plain(self.one.state) == plain(self.other.state)
        assert self.one.wanted == self.other.wanted
        for action in answers[0]:
            if isinstance(action, Launch):
                self.running.append(action.sample)
            elif isinstance(action, Judge):
                self.judging.append(action.group.key)
            elif isinstance(action, NeedPrompts):
                self.asked += action.prompts
            elif isinstance(action, RoundOver):
                assert not self.running
                self.judging, self.asked = [], 0


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
        )
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
                both.tell("end_prompts")
        elif chance < 0.015:
            both.tell("cancel")
        elif both.judging and (chance < 0.2 or not both.running):
            both.tell("record_verdict", both.judging.pop(rng.randrange(len(both.judging))), rng.random() < 0.6)
        elif both.running:
            # Now the oldest, now any: rounds get on, and out of order.
            sample = both.running.pop(0 if rng.random() < 0.5 else rng.randrange(len(both.running)))
            tokens = rng.randint(1, 30)
            output = Output(spans=[Span(version_now, tokens)], finish_reason="stop" if rng.random() < 0.85 else "")
            both.tell("record_finished" if output.finish_reason else "record_stopped", sample, output)


@for_each([(seed,) for seed in range(fewer(60))])
def test_decisions_are_those_of_the_definitions(seed: int):
    anything(seed, prompts=5, responses=3, events=250)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_in_larger_rounds_as_well(seed: int):
    anything(1000 + seed, prompts=40, responses=6, events=700)


def count_lines(mode: str, prompts: int) -> int:
    """Lines of the costliest of the events in the middle of a round's samples."""
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
            lines, actions = lines_run(lambda s=sample, o=output: admitter.record_finished(s, o))
            count += 1
            if not admitter.state.round or admitter.state.round.stopping:
                for left in running:
                    admitter.record_stopped(left, Output())
                break
            worst = max(worst, lines)
        running = []
    return worst


@pytest.mark.parametrize("mode", MODES)
def test_an_event_costs_the_same_in_a_round_of_any_size(mode: str):
    assert count_lines(mode, 64) <= count_lines(mode, 8) + 40
