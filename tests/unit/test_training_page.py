"""``docs/results/rl_step.csv`` and ``studies/lending.csv`` are what the code makes: some lines, simulated again."""

from __future__ import annotations

import csv
from statistics import mean

import pytest

from bench import _redraw
from studies import lending, rl_step, step_picture
from studies.training import SimulatedTrainer

pytestmark = [pytest.mark.unit, pytest.mark.slow]


@pytest.mark.long
def test_steps_with_ranks_lent():
    with lending.STORED.open(newline="") as file:
        heads, *rows = csv.reader(file)
    tasks = lending.list_tasks(quick=True, seed=0)
    assert tuple(heads) == lending.HEADS
    assert [tuple(row[:3]) for row in rows] == [(t[4], t[0], t[1]) for t in tasks]
    cell = lending.study(tasks[8])
    assert cell is not None
    assert tuple(rows[8]) == lending.list_rows([cell])[0]


@pytest.mark.long
def test_stages_of_a_step():
    rows = _redraw.read_rows("rl_step")
    assert [(row["setting"], row["with"]) for row in rows] == [
        (setting.name, row) for setting in rl_step.SETTINGS for row in rl_step.ROWS
    ]
    plain = {row["setting"]: row for row in rows if row["with"] == "plain"}
    measured = plain[rl_step.MEASURED.name]
    training = rl_step.TRAINING_SHARE * float(measured["rollout, s"])
    assert float(measured["training, s"]) == pytest.approx(training, abs=0.1)
    quickest = rl_step.SETTINGS[0]
    jobs = [rl_step.StepJob(quickest, "plain", rl_step.STEPS, seed, 0.0) for seed in range(1, rl_step.SEEDS + 1)]
    rollout = mean(rl_step.simulate(job).rollout for job in jobs)
    assert float(plain[quickest.name]["rollout, s"]) == pytest.approx(rollout, abs=0.1)


def test_a_row_is_a_mean_over_seeds_with_the_range_of_its_gain():
    def stages(rollout: float) -> rl_step.Stages:
        return rl_step.Stages(rollout, reward=10.0, training=20.0, hidden=0.0, lent=0.0, tokens=1.0)

    found = {"14B, 16K": {"plain": [stages(70.0), stages(170.0)], "tail batching": [stages(20.0), stages(50.0)]}}
    plain, tail = rl_step.list_rows(found)
    assert plain == ("14B, 16K", "plain", "120.0", "10.0", "20.0", "0.0", "150.0", "1.00", "1.00")
    assert tail[6:] == ("65.0", "2.31 (2.00 to 2.50)", "1.48"), "300 of 130, 100 of 50, 200 of 80"


def test_bars_of_a_step_are_as_long_as_their_labels():
    rows = _redraw.read_rows("rl_step")
    for found in step_picture.read_lines(rows).values():
        for row in found.values():
            assert abs(sum(row[stage] for stage in step_picture.STAGES) - row["step, s"]) < 0.2


def test_all_ranks_train_what_is_left_as_rewards_come():
    trainer = SimulatedTrainer()
    for seconds, came in ((5.0, 0.0), (3.0, 12.0), (1.0, 40.0)):
        trainer.add(seconds, came)
    assert trainer.finish(10.0) == (22.0, 9.0), "until 15, 18, and from 40 to 41"
    trainer.free = 8.0
    trainer.advance(10.0)
    assert trainer.begun == 5.0 and trainer.free == 18.0
    assert trainer.count_done_seconds(10.0) == 1.0 and trainer.finish(10.0) == (23.0, 8.0)
