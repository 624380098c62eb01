"""verl jobs as their users have them: an agent of several turns, a reward model, a Ray cluster that runs already."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_cpu import cpu_jobs

from sglang_pat.integrations.verl.fields import expand_runs
from sglang_pat.testing.ports import find_free_port

from . import jobs, verl_agents
from .jobs import SWITCHING

pytestmark = pytest.mark.integration

EXAMPLE = runpy.run_path(str(jobs.EXAMPLES / "verl_grpo" / "run_cpu.py"))
SYNC = "trainer.v1.trainer_mode=sglang_pat_sync"
OURS = "+actor_rollout_ref.rollout.engine_kwargs.sglang_pat={{base_tp:1,policy:threshold,switch_at:12"
HELPER = (
    "{{device:cpu,attention_backend:torch_native,sampling_backend:pytorch,grammar_backend:none,"
    "enable_memory_saver:false,max_total_tokens:8192}}"
)
"""SGLang's arguments for a reward model."""


@pytest.fixture
def own_modules(monkeypatch) -> None:
    """The job's processes can import what is in the tests' folder."""
    monkeypatch.setenv("PYTHONPATH", str(jobs.ROOT), prepend=os.pathsep)


@pytest.mark.long
def test_an_agent_of_several_turns(verl_job, own_modules, tmp_path):
    """All turns' tokens have their degree, a tool's tokens have none, and the engine's probabilities are the
    trainer's across turns and switches."""
    agents = tmp_path / "agents.yaml"
    agents.write_text(f"- name: two_turns\n  _target_: {verl_agents.__name__}.TwoTurns\n")
    rollout = "actor_rollout_ref.rollout"
    job = verl_job(
        *SWITCHING, "--steps", "2", SYNC, f"{rollout}.agent.agent_loop_config_path={agents}",
        f"{rollout}.agent.default_agent_loop=two_turns",
    )  # fmt: skip
    assert len(job.steps) == 2 and job.switches("decisions.0.jsonl") >= 2
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    turns = [json.loads(line) for line in (job.out / "turns.jsonl").read_text().splitlines()]
    assert len(turns) == 2 * 16
    degrees = []
    for turn in turns:
        begin, end = turn["tool"]
        known = expand_runs(turn["tp_from_token"], turn["tokens"])
        assert len(known) == turn["tokens"] > end
        assert [i for i, degree in enumerate(known) if degree is None] == list(range(begin, end))
        versions = expand_runs(turn["global_steps_from_token"], turn["tokens"])
        assert len({version for version in versions if version is not None}) == 1
        degrees += [degree for degree in known if degree]
    assert {*degrees} == {1, 2}
    for tp in (1, 2):
        assert sum(job.series(f"rollout/tokens/tp{tp}")) == degrees.count(tp)


@pytest.mark.soak
def test_a_reward_model_beside_the_engine(verl_job, own_modules, flat, tmp_path, monkeypatch):
    """The reward model is verl's own SGLang, though it has the engine's name and the variable is there."""
    monkeypatch.setenv("SGLANG_PAT", "base_tp=1")
    model = {
        "enable": "true", "enable_resource_pool": "true", "n_gpus_per_node": 2, "nnodes": 1,
        "model_path": EXAMPLE["with_chat_template"](flat, tmp_path / "judge"), "rollout.name": "sglang",
        "rollout.tensor_model_parallel_size": 2, "rollout.dtype": "float32", "rollout.free_cache_engine": "false",
        "rollout.engine_kwargs.sglang": HELPER,
    }  # fmt: skip
    own = [f"++reward.reward_model.{name}={value}" for name, value in model.items()]
    function = f"reward.custom_reward_function.path={verl_agents.__file__}"
    job = verl_job(
        "--rollout", "sglang", "--steps", "2", SYNC, *own, function, "reward.custom_reward_function.name=judged",
        OURS + ",log:{out}/decisions.jsonl}}", "ray_kwargs.ray_init.num_gpus=4",
    )  # fmt: skip
    assert len(job.steps) == 2 and job.switches("decisions.0.jsonl") >= 2
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    assert min(job.series("critic/score/max")) > max(0, *job.series("critic/score/min")), "it judges"


@pytest.fixture
def cluster() -> Iterator[str]:
    """Address of a Ray cluster that has two "GPUs", and knows nothing of this engine's variable."""
    port = find_free_port()
    environment = EXAMPLE["environment"](Path(), 2) | {"RAY_AUTH_MODE": "disabled"}
    with cpu_jobs.ray_folder() as folder:
        command = [
            Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--port", str(port),
            "--num-cpus", "32", "--num-gpus", "2", "--include-dashboard", "false",
            "--object-store-memory", "500000000", "--temp-dir", str(folder),
        ]  # fmt: skip
        process = subprocess.Popen(command, env=environment)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(jobs.LEFT_SECONDS)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["sglang", "sglang_pat"])
def test_a_ray_cluster_that_runs_already(verl_job, cluster, name):
    """Name and settings reach its workers, and nothing of a job stays in it."""
    ray_init = "ray_kwargs.ray_init"
    others = ["num_gpus", "include_dashboard", "object_store_memory", "_temp_dir"]
    given = [OURS + ",log:{out}/decisions.jsonl}}"] if name == "sglang" else SWITCHING
    job = verl_job(
        "--rollout", name, "--steps", "2", SYNC, *given, f"+{ray_init}.address={cluster}",
        f"{ray_init}.num_cpus=null", *(f"~{ray_init}.{other}" for other in others),
        f"+{ray_init}.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={{out}}/metrics.jsonl",
    )  # fmt: skip
    assert len(job.steps) == 2 and job.switches("decisions.0.jsonl") >= 2
    assert max(job.series("training/rollout_probs_diff_max")) <= 1e-6
    assert jobs.nothing_left("VERL_FILE_LOGGER_PATH", str(job.out / "metrics.jsonl"))
