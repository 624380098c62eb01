"""The example of GRPO on a real engine: two steps of each way, one that is killed in the middle of a step, a model and
a task from elsewhere, and a rank that is lent."""

from __future__ import annotations

import signal

import msgspec
import pytest

from examples.grpo.picture import Results
from examples.grpo.train import RULES


@pytest.mark.long
def test_two_steps_of_each_way(servers, tmp_path):
    """Trainer and engine agree about what the policy thinks of its responses, and a checkpoint goes on to the end."""
    done = servers.run("tests.engine.grpo_case", "ways", str(tmp_path))
    assert done.returncode == 0 and done.stdout.split() == list(RULES), done.stdout + done.stderr[-3000:]


def test_a_run_that_is_killed_trains_every_prompt_once(servers, tmp_path):
    assert servers.run("tests.engine.grpo_case", "killed", str(tmp_path)).returncode == -signal.SIGKILL
    done = servers.run("tests.engine.grpo_case", "again", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = msgspec.json.decode((tmp_path / "figures.json").read_bytes(), type=Results)
    assert sorted(number for row in found.rows for number in row.trained) == list(range(12))
    assert "12 of 12 prompts trained, 12 different ones" in done.stdout
    assert (tmp_path / "grpo.png").stat().st_size > 10_000


@pytest.mark.long
def test_a_checkpoint_learns_a_task_of_reasoning_gym(servers, tmp_path):
    """Two steps; engine and trainer have the same weights in both, though the embedding is the output matrix, too."""
    done = servers.run("tests.engine.grpo_case", "task", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = msgspec.json.decode((tmp_path / "figures.json").read_bytes(), type=Results)
    assert sorted(number for row in found.rows for number in row.trained) == list(range(8))
    assert all(row.apart < 1e-4 and max(row.lengths) <= 20 and 0 < row.reward < 1 for row in found.rows)
    assert found.run.task == "chain_sum" and found.before > 0


def test_groups_are_trained_on_a_rank_that_is_lent(servers, tmp_path):
    """The gradient of the step is that of all its groups at once, with the weights that generated them."""
    done = servers.run("tests.engine.grpo_case", "lend", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
