"""What the adapter leans on in verl: another verl fails here first, by name.

``verl_contract.txt`` has the symbols that it overrides, calls or reads, with their parameters.  Here are lines of code
that it counts on, and its checks of a job before anything is loaded.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer import main_ppo
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils.reward_score import default_compute_score
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout import router
from verl.workers.rollout.replica import RolloutReplicaRegistry

from sglang_pat.integrations.verl.balancer import AdaptiveBalancer
from sglang_pat.integrations.verl.trainers import AdaptiveTrainer
from sglang_pat.launch.contract import Symbol

pytestmark = pytest.mark.integration

LINES = [
    line
    for line in Path(__file__).with_name("verl_contract.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

RolloutReplicaRegistry.get("sglang")  # puts stand-ins for vLLM's modules in place


def problem(line: str) -> str | None:
    """What is wrong with verl's symbol; one without parameters is no function."""
    if "(" in line:
        found = Symbol.parse(line).find_problem()
        # Ray adds this one to the methods of what a test before has made an actor.
        return None if found == "parameters changed: _ray_trace_ctx" else found
    module, _, name = line.partition(":")
    owner, _, last = name.rpartition(".")
    if not owner:
        return None if hasattr(importlib.import_module(module), last) else "missing"
    kind = getattr(importlib.import_module(module), owner)
    code = "".join(inspect.getsource(one) for one in kind.__mro__ if one.__module__.startswith("verl."))
    return None if hasattr(kind, last) or re.search(rf"\bself\.{last}\b[^=\n]*= ", code) else "missing"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0].rpartition(":")[2])
def test_symbol(line):
    assert problem(line) is None


def test_a_changed_symbol_is_named():
    where = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
    assert problem(f"{where}._clear_groups(self, partition_id, uids, more)") == "parameters changed: more"
    assert problem(f"{where}.no_such_method(self)").startswith("missing")
    assert problem(f"{where}.no_such_attribute") == "missing"


TASK = main_ppo.TaskRunnerV1.__ray_metadata__.modified_class
COUNTED_ON = {
    "models are loaded after the trainer is made": (TASK.run, "trainer_cls(config=config)", "self.trainer.init()"),
    "keys of responses": (agent_loop_tq, 'keys.append(f"{uid}_{session_id}_{i}")'),
    "tokens of a response": (agent_loop_tq, '"response_len": response_len'),
    "a prompt ends after its last response": (agent_loop_tq, "session_errors = await _settle_session_tasks(tasks)"),
    "a checkpoint's folder": (PPOTrainer, 'f"global_step_{self.global_steps}"'),
    "where a job goes on": (PPOTrainer, 'resume_mode == "resume_path"'),
    "nothing was loaded": (PPOTrainer, "self.global_steps = 0"),
    "data are loaded before models": (PPOTrainer._setup, "self._init_dataloader()", "RayWorkerGroup("),
    "a response is written after its reward": (agent_loop_tq, "await self._compute_score(", "tq.async_kv_batch_put("),
    "a response has a number": (agent_loop_tq, "session_id=i, **prompt"),
    "what a reward worker is told": (
        AgentLoopWorker._compute_score,
        "**{k: np.array([v] * n) for k, v in kwargs.items()}",
        '"tool_extra_fields": np.array([o.extra_fields for o in outputs]',
        '"response_len": np.array([len(o.response_ids) for o in outputs])',
    ),
    "where it puts what it found": (AgentLoopWorker._compute_score, 'result["reward_score"]', '"reward_extra_info"'),
    "data whose rewards run programs": (
        default_compute_score,
        'elif data_source in ["codecontests", "apps", "codeforces", "taco"]:',
        "sandbox_fusion.compute_score(",
        "prime_code.compute_score(",
    ),
    "passes without gradients take the size that a batch names": (
        TrainingWorker.infer_batch,
        "micro_batch_size_per_gpu=self.engine_config.",
        "if key not in data.keys():",
    ),
    "weights are called by the step after which they are sent": (
        PPOTrainerSeparateAsync.on_step_end,
        "self.standalone_checkpoint_manager.update_weights(self.global_steps)",
    ),
    "who generates is the trainer's again": (
        PPOTrainerSeparateAsync.switch_to_trainer,
        "self.remove_replicas_from_balancer()",
        "abort_replicas(reject_request=True)",
    ),
    "what a step does with a batch, in our StreamStep.train_chunk, too": (
        PPOTrainer._step_once,
        "self.on_sample_begin()",
        "self.replay_buffer.sample(",
        'batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature',
        "self.on_sample_end()",
        "batch = self._compute_reward_colocate(",
        "batch = self._balance_batch(",
        "batch = self._compute_old_log_prob(",
        "batch = self._compute_ref_log_prob(",
        "batch = self._compute_values(",
        "batch = self._compute_advantage(",
        "batch = self._update_critic(",
        "batch = self._update_actor(",
        "return batch",
    ),
    "a step's prompts are started first": (PPOTrainer.step, "self.prepare_step()", "self._step_once("),
    "the buffer is there before": (PPOTrainer, "self.replay_buffer = self._build_replay", "self._load_checkpoint()"),
}
"""Lines of verl's code that no symbol says, in their order."""


@pytest.mark.parametrize("what", COUNTED_ON)
def test_counted_on(what):
    where, *lines = COUNTED_ON[what]
    places = [inspect.getsource(where).index(line) for line in lines]
    assert places == sorted(places)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async", "stream", "stream_lent"])
def test_a_hook_of_verls_is_overridden_in_one_place(mode):
    """The class of a mode is verl's and one of ours, and none of its methods goes on in ours by the order of bases."""
    kind = get_trainer_cls(f"sglang_pat_{mode}")
    ours, verls = kind.__bases__
    assert issubclass(ours, AdaptiveTrainer) and verls.__module__.startswith("verl.")
    names = {*vars(ours), *vars(AdaptiveTrainer)}
    both = [name for name in vars(kind).keys() & names if inspect.isfunction(vars(kind)[name])]
    assert set(both) <= {"__init__"}


def test_balancer_has_what_verl_asks_of_one():
    def parameters(function) -> set[str]:
        return set(inspect.signature(function).parameters) - {"self", "_ray_trace_ctx"}

    asked = {name for name in vars(router.RequestLoadBalancer) if not name.startswith("_")}
    assert asked >= {"acquire_server", "release_server", "add_servers", "remove_servers"}
    for name in asked | {"get_inflight_count"}:
        theirs = parameters(getattr(router.GlobalRequestLoadBalancer, name))
        assert theirs <= parameters(getattr(AdaptiveBalancer, name)), name


def test_a_registration_that_fails_is_told():
    code = "import sys; sys.modules['transfer_queue'] = None; import verl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if "rollout.name=sglang_pat is not there for this job" in line]
    assert len(lines) == 1 and "transfer_queue" in lines[0], done.stderr


# -- what a job says, checked by each trainer ------------------------------------------------------------------


def trainer(mode: str, setting: str, *more: str):
    """A trainer of this mode, as ``TaskRunner`` makes it."""
    rollout = "actor_rollout_ref.rollout."
    words = [f"trainer.v1.trainer_mode={mode}", f"{rollout}name=sglang_pat", *more]
    words += [f"{rollout}tensor_model_parallel_size=8", f"+{rollout}engine_kwargs.sglang_pat={{{setting}}}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words)
    return get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


MODES = ["sync", "colocate_async", "separate_async"]


@pytest.mark.parametrize("mode", [*MODES, *(f"sglang_pat_{mode}" for mode in MODES)])
def test_a_wrong_setting_ends_the_job_before_anything_is_loaded(mode):
    with pytest.raises(ValueError, match=r"^rollout\.engine_kwargs\.sglang_pat: candidate tp=3"):
        trainer(mode, "candidates: [1, 3]")


@pytest.mark.parametrize(
    "word, line",
    [
        ("+{rollout}.engine_kwargs.sglang.page_size=16", "rollout.engine_kwargs.sglang.page_size is 16"),
        ("actor_rollout_ref.model.lora_rank=8", "model.lora_rank is 8, must be 0 (or model.lora.merge true)"),
        ("actor_rollout_ref.model.path={moe}", "model.path {moe}: an adaptive engine does not support OlmoeForCausal"),
        ("+{rollout}.quantization=fp8", "rollout.quantization is fp8, must be null"),
        ("+{rollout}.engine_kwargs.sglang_pat.device=cpu", "SGLang's own are given with"),
    ],
)
def test_so_does_what_the_engine_refuses_in_the_words_of_the_configuration(word, line, tmp_path):
    config = {"architectures": ["OlmoeForCausalLM"], "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as refused:
        trainer("sync", "base_tp: 1", word.format(moe=tmp_path, rollout="actor_rollout_ref.rollout"))
    assert line.format(moe=tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_right_settings_and_adapters_that_are_merged_are_fine():
    words = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=true"]
    assert trainer("sglang_pat_sync", "candidates: [1, 8]", *words).trainer_mode == "sync"
