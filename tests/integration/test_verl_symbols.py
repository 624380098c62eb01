"""What the adapter leans on in verl beside its symbols, which are in ``verl_contract.txt``."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop import tool_agent_loop
from verl.trainer import main_ppo
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base
from verl.workers.rollout import base, llm_server, replica, router

pytestmark = pytest.mark.integration

VERL = Path(inspect.getfile(replica)).parents[2]


def sglang_server():
    replica.RolloutReplicaRegistry.get("sglang")  # puts stand-ins for vLLM's modules in place
    from verl.workers.rollout.sglang_rollout import async_sglang_server

    return async_sglang_server


def parameters(function) -> list[str]:
    # Ray adds a parameter to the methods of what was made an actor.
    return [name for name in inspect.signature(function).parameters if name not in ("self", "_ray_trace_ctx")]


def test_registries():
    assert callable(replica.RolloutReplicaRegistry._registry["sglang"])
    assert '("sglang", "async"): "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"' in (
        inspect.getsource(base)
    )
    assert {"sync", "colocate_async", "separate_async"} <= set(trainer_base.TRAINER_REGISTRY)


def test_replica_and_server():
    server_module = sglang_server()
    source = inspect.getsource(server_module.SGLangReplica)
    assert "self.server_class" in source, "the actor's class can be chosen"
    source = inspect.getsource(server_module.SGLangHttpServer)
    for needed in ("Engine._launch_subprocesses(", "ServerArgs(**args)", "self.tokenizer_manager.generate_request("):
        assert needed in source, needed
    assert {"token_ids", "extra_fields", "stop_reason"} <= set(replica.TokenOutput.model_fields)


def test_clients():
    assert issubclass(llm_server.FullyAsyncLLMServerClient, llm_server.LLMServerClient)
    assert "super().generate(" in inspect.getsource(llm_server.FullyAsyncLLMServerClient.generate), "once for each part"


def trainer(mode: str, setting: str, *more: str):
    """A trainer of this mode, as ``TaskRunner`` makes it."""
    rollout = "actor_rollout_ref.rollout."
    words = [f"trainer.v1.trainer_mode={mode}", f"{rollout}name=sglang_pat", *more]
    words += [f"{rollout}tensor_model_parallel_size=8", f"+{rollout}engine_kwargs.sglang_pat={{{setting}}}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words)
    return trainer_base.get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


MODES = ["sync", "colocate_async", "separate_async"]


@pytest.mark.parametrize("mode", [*MODES, *(f"sglang_pat_{mode}" for mode in MODES)])
@pytest.mark.parametrize(
    "setting, line",
    [
        ("candidates: [1, 3]", "candidate tp=3"),
        ("profile: /nowhere", "profile /nowhere: No such file or directory"),
        ("policy: survivl", "--pat-policy 'survivl': choose one of"),
    ],
)
def test_a_wrong_setting_ends_the_job_before_anything_is_loaded(mode, setting, line):
    with pytest.raises(ValueError) as refused:
        trainer(mode, setting)
    assert str(refused.value).startswith(f"rollout.engine_kwargs.sglang_pat: {line}")
    assert "\n" not in str(refused.value)


def test_right_settings_are_accepted():
    assert trainer("sglang_pat_sync", "candidates: [1, 8]").trainer_mode == "sync"


@pytest.mark.parametrize("mode", ["sync", "sglang_pat_colocate_async"])
@pytest.mark.parametrize(
    "word, line",
    [
        (
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.page_size=16",
            "rollout.engine_kwargs.sglang.page_size is 16",
        ),
        ("actor_rollout_ref.model.lora_rank=8", "model.lora_rank is 8, must be 0 (or model.lora.merge true)"),
        (
            "actor_rollout_ref.model.path={moe}",
            "model.path {moe}: an adaptive engine does not support Qwen3MoeForCausal",
        ),
        ("+actor_rollout_ref.rollout.quantization=fp8", "rollout.quantization is fp8, must be None"),
        ("+actor_rollout_ref.rollout.engine_kwargs.sglang_pat.device=cpu", "SGLang's own are given with"),
    ],
)
def test_so_does_what_the_engine_refuses_in_the_words_of_the_configuration(mode, word, line, tmp_path):
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as refused:
        trainer(mode, "base_tp: 1", word.format(moe=tmp_path))
    assert line.format(moe=tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_adapters_that_are_merged_are_fine():
    words = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=true"]
    assert trainer("sync", "base_tp: 1", *words).trainer_mode == "sync"


def test_a_trainer_is_made_before_models_are_loaded():
    run = inspect.getsource(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class.run)
    assert run.index("trainer_cls(config=config)") < run.index("self.trainer.init()")
    assert "init_model()" in inspect.getsource(trainer_base.PPOTrainer)
    assert "init_model()" not in inspect.getsource(trainer_base.PPOTrainer.__init__)


def test_turns_of_a_response():
    """A sample's extra fields are those of its first turn, in the objects that the client gave; later turns add."""
    source = inspect.getsource(tool_agent_loop.ToolAgentLoop)
    assert "agent_data.extra_fields.update(output.extra_fields)" in source
    assert "request_id=agent_data.request_id" in source, "the same in all turns"


def test_what_the_queue_says_of_responses():
    """Tail batching reads from verl's tags which responses are there, and how long each is."""
    source = inspect.getsource(agent_loop_tq)
    for needed in (
        'keys.append(f"{uid}_{session_id}_{i}")',
        '"response_len": response_len',
        "for i in range(n):",
        "session_errors = await _settle_session_tasks(tasks)",  # a prompt is noted as ended after its last response
    ):
        assert needed in source, needed
    assert '"status"' in inspect.getsource(replay_buffer.ReplayBuffer._sync_metadata_from_transfer_queue)


def test_partial_rollout_is_verls_own_in_colocate_async_only():
    """Why tail_batching=partial is refused: docs/integrate.md."""
    keeps = inspect.getsource(llm_server.FullyAsyncLLMServerClient.generate)
    assert "prompt_ids=prompt_ids + final_output.token_ids" in keeps, "goes on with what was generated"
    assert "token_ids" not in inspect.getsource(llm_server.LLMServerClient.generate)
    of_sync = trainer_base.get_trainer_cls("sync")
    assert of_sync.get_llm_client is trainer_base.PPOTrainer.get_llm_client, "the plain client"
    starts = inspect.signature(agent_loop_tq.AgentLoopManagerTQ.generate_sequences)
    assert list(starts.parameters) == ["self", "prompts"], "prompts, and nothing to go on from"


def test_checkpoints():
    """Prompts that wait are kept beside verl's files, before it notes that the checkpoint is complete."""
    saving, loading = (getattr(trainer_base.PPOTrainer, f"_{verb}_checkpoint") for verb in ("save", "load"))
    assert 'f"global_step_{self.global_steps}"' in inspect.getsource(saving)
    assert "self.global_steps = 0" in inspect.getsource(loading), "0: nothing was loaded"
    assert 'resume_mode == "resume_path"' in inspect.getsource(loading)
    setup = inspect.getsource(trainer_base.PPOTrainer)
    assert setup.index("self.replay_buffer = self._build_replay_buffer()") < setup.index("self._load_checkpoint()")


def test_balancer_has_what_verl_asks_of_one():
    from sglang_pat.integrations.verl.balancer import AdaptiveBalancer

    asked = {name for name in vars(router.RequestLoadBalancer) if not name.startswith("_")}
    assert asked >= {"acquire_server", "release_server", "add_servers", "remove_servers"}
    for name in asked | {"get_inflight_count"}:
        ours, theirs = getattr(AdaptiveBalancer, name), getattr(router.GlobalRequestLoadBalancer, name)
        for parameter in parameters(theirs):
            assert parameter in parameters(ours), f"{name}({parameter})"


def test_names_are_registered_by_installing():
    """What replicas of them are: test_verl_replicas.py."""
    assert replica.RolloutReplicaRegistry._registry["sglang_pat"].__module__.startswith("sglang_pat.")
    assert base._ROLLOUT_REGISTRY["sglang_pat", "async"].startswith("sglang_pat.")
    assert trainer_base.get_trainer_cls("sglang_pat_colocate_async").__name__ == "AdaptiveColocateAsync"


def test_where_verl_asks_for_the_name_sglang():
    """docs/integrate.md says what of this matters for the adaptive engine."""
    asks = re.compile(r"""^[^#\n]*(==|\bcase|\bin) [({]?("\w+", )*"sglang\"""", re.MULTILINE)
    found = {str(path.relative_to(VERL)) for path in VERL.rglob("*.py") if asks.search(path.read_text())}
    assert found == {
        "checkpoint_engine/base.py",  # checkpoint_engine.backend=delta_sharded
        "experimental/reward_loop/reward_loop.py",  # a discriminative reward model
        "workers/config/distillation.py",  # a teacher whose loss takes its top tokens
        "workers/config/rollout.py",  # pipeline parallelism, disaggregation
        "workers/engine_workers.py",  # LoRA: what a sleeping engine has kept
        "workers/rollout/llm_server.py",  # videos
        "workers/rollout/replica.py",  # disaggregation
    }


def test_what_a_replica_is_for():
    """verl says whether it is a reward model's or a teacher's; the configuration does not."""
    makers = {
        "reward_loop/reward_model.py": "is_reward_model=True",
        "teacher_loop/teacher_model.py": "is_teacher_model=True",
    }
    for path, said in makers.items():
        assert said in (VERL / "experimental" / path).read_text()
    source = inspect.getsource(replica.RolloutReplica.__init__)
    assert "self.is_reward_model = is_reward_model" in source and "self.is_teacher_model = is_teacher_model" in source
    defaults = (VERL / "trainer" / "config" / "distillation" / "distillation.yaml").read_text()
    assert "name: ${oc.select:actor_rollout_ref.rollout.name}" in defaults, "a teacher's, if none is given"


def test_a_registration_that_fails_is_told():
    code = "import sys; sys.modules['transfer_queue'] = None; import verl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if "rollout.name=sglang_pat is not there for this job" in line]
    assert len(lines) == 1 and "transfer_queue" in lines[0], done.stderr
