"""Figures of ``docs/results/training.md`` are those of the code: some lines of its tables, simulated again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import _redraw
from studies import lending, rl_step
from studies.training import Trainer

pytestmark = [pytest.mark.unit, pytest.mark.slow]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "training.md"


def test_steps_with_ranks_lent():
    (rows,) = _redraw.tables(PAGE, *lending.HEADS)
    tasks = lending.list_tasks(quick=True, seed=0)
    assert [(row["training"], row["machine"], row["lengths"]) for row in rows] == [(t[4], t[0], t[1]) for t in tasks]
    cell = lending.study(tasks[8])
    assert cell is not None
    assert tuple(rows[8].values()) == lending.list_rows([cell])[0]


def test_stages_of_a_step():
    (rows,) = _redraw.tables(PAGE, *rl_step.HEADS)
    assert [(row["setting"], row["with"]) for row in rows] == [
        (setting.name, row) for setting in rl_step.SETTINGS for row in rl_step.ROWS
    ]
    setting = rl_step.MEASURED
    plain = rl_step.simulate(rl_step.Job(setting, "plain", 40, 1, 0.0))
    training = rl_step.TRAINING_SHARE * plain.rollout
    found = {setting.name: {"plain": replace(plain, training=training)}}
    line = next(tuple(row.values()) for row in rows if row["setting"] == setting.name)
    assert rl_step.list_rows(found) == [line]


def test_all_ranks_train_what_is_left_as_rewards_come():
    trainer = Trainer()
    for seconds, came in ((5.0, 0.0), (3.0, 12.0), (1.0, 40.0)):
        trainer.add(seconds, came)
    assert trainer.finish(10.0) == (22.0, 9.0), "until 15, 18, and from 40 to 41"
    trainer.free = 8.0
    trainer.advance(10.0)
    assert trainer.begun == 5.0 and trainer.free == 18.0
    assert trainer.count_done_seconds(10.0) == 1.0 and trainer.finish(10.0) == (23.0, 8.0)
