"""What a round's summary says of its cost: seconds of plain rounds, the error of the estimated mean, a warning."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest

from sglang_pat.rollout.estimates import LengthBin, compute_longest_chances, get_bin
from sglang_pat.rollout.records import SampleId
from sglang_pat.rollout.rounds import RolloutRound

from .admission_world import dumps, loads, strict, whole_epoch
from .rounds_world import Played, admitter, list_events
from .test_simulated_rounds import Constant, simulation

pytestmark = pytest.mark.unit

LENGTHS = "body-atom:6.363,0.70,16384,0.02"
MANY_LONG = "body-atom:5,0.2,4000,0.1"


@functools.cache
def list_summaries(shape: str, rounds: int, **rules) -> list:
    """Summaries of rounds in which a step takes 10 ms whatever runs."""
    job = simulation(shape, predictor=Constant(), **{"eta_responses": 1.0} | rules)
    return [job.run_round(version).summary for version in range(rounds)]


def test_the_chance_of_a_bin_to_have_the_longest():
    """A level in which a tenth is long, and one that is short: two prompts with three responses each."""
    short, long = get_bin(100), get_bin(5000)
    levels = [
        (0.25, {short: LengthBin(10, 0.9, 100.0), long: LengthBin(1, 1.0, 5000.0)}),
        (0.75, {short: LengthBin(10, 1.0, 100.0)}),
    ]
    found = compute_longest_chances(levels, prompts=2, responses=3)
    assert found[short] == pytest.approx((0.25 * 0.9**3 + 0.75) ** 2)
    assert found[short] + found[long] == pytest.approx(1)


@pytest.mark.long
@pytest.mark.parametrize("eta", [1.0, 1.25])
def test_plain_seconds_are_those_of_plain_rounds(eta):
    plain = [summary.seconds for summary in list_summaries(LENGTHS, 60, eta_prompts=1.0)]
    last = list_summaries(LENGTHS, 40, eta_responses=eta)[-1]
    assert last.plain_seconds == pytest.approx(sum(plain) / len(plain), rel=0.25)
    assert last.mean_seconds < 0.7 * last.plain_seconds
    assert last.warning == ""


def test_a_job_is_told_once_that_tail_batching_does_not_pay(caplog):
    """A tenth of the responses is long: most prompts have such a one, in each draw."""
    warnings = [summary.warning for summary in list_summaries(MANY_LONG, 18, unbiased=True)]
    lines = [warning for warning in warnings if warning]
    assert warnings.index(lines[0]) == 15 and len(lines) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert lines[0].startswith("tail batching (strict, unbiased): its rounds take ")
    assert "s on average, with these lengths plain ones (eta_prompts and eta_responses 1) would take some" in lines[0]
    assert "tokens are generated for each one returned" in lines[0]
    assert not any(summary.warning for summary in list_summaries(MANY_LONG, 18, eta_prompts=1.0))


class Slow(Played):
    """Takes longer than the clock of an event loop can tell."""

    async def generate(self, rid, prompt, params):
        await asyncio.sleep(0.005)
        return await super().generate(rid, prompt, params)


async def test_a_round_on_an_engine_is_timed():
    engine, mine = Slow(), admitter(3, 3, 3)
    *groups, summary = await list_events(RolloutRound(mine, engine, 0, {"max_new_tokens": 50}))
    assert all(sample.output.seconds > 0 for group in groups for sample in group.list_kept())
    assert summary.seconds == summary.mean_seconds > 0 and summary.plain_seconds > 0
    assert loads(dumps(mine)).state.cost == mine.state.cost
    mine.restore(mine.make_snapshot())
    assert mine.state.cost.rounds == 1


def test_where_nobody_has_a_clock_nothing_is_said_of_seconds():
    last = whole_epoch(strict(), 40).rounds[-1]
    assert (last.seconds, last.mean_seconds, last.plain_seconds) == (0, 0, 0)


class SomeAlwaysLong:
    """15% of the prompts; of the responses to the others one in a hundred runs to the limit."""

    limit = 16384
    mean = 0.15 * 8000 + 0.85 * (0.99 * 350 + 0.01 * limit)

    def sample_length(self, seed: int, sample: SampleId, correlation: float) -> int:
        draw = random.Random(f"{tuple(sample)}").random()
        if random.Random(f"{tuple(sample.key)}").random() < 0.15:
            return int(6000 + 4000 * draw)
        return self.limit if draw > 0.99 else int(200 + 300 * draw)


@pytest.mark.long
@pytest.mark.parametrize("eta", [1.0, 1.25])
def test_the_estimate_where_some_prompts_are_always_long(eta):
    job = simulation(LENGTHS, predictor=Constant(), num_prompts=32, eta_responses=eta)
    job._shape = truth = SomeAlwaysLong()
    last = [job.run_round(version).summary for version in range(10)][-1]
    assert last.mean_returned < truth.mean
    assert 0 < last.mean_undropped_error < 0.1 * truth.mean
    assert last.mean_undropped == pytest.approx(truth.mean, rel=0.12)
