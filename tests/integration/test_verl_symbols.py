"""What of verl's the adapter leans on: another verl fails here first, by name."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop import tool_agent_loop
from verl.trainer import main_ppo
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base
from verl.workers.rollout import base, llm_server, replica, router

pytestmark = pytest.mark.integration


def sglang_modules():
    replica.RolloutReplicaRegistry.get("sglang")  # puts stand-ins for vLLM's modules in place
    from verl.workers.rollout.sglang_rollout import async_sglang_server, sglang_rollout

    return async_sglang_server, sglang_rollout


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_registries():
    assert parameters(replica.RolloutReplicaRegistry.register) == ["name", "loader"]
    assert callable(replica.RolloutReplicaRegistry._registry["sglang"])
    assert base._ROLLOUT_REGISTRY["sglang", "async"].rpartition(".")[2] == "ServerAdapter"
    assert parameters(trainer_base.register_trainer) == ["name"]
    assert {"sync", "colocate_async", "separate_async"} <= set(trainer_base.TRAINER_REGISTRY)


def test_replica_server_and_adapter():
    server_module, adapter_module = sglang_modules()
    named = ["is_reward_model", "is_teacher_model", "name_suffix"]
    wanted = ["replica_rank", "config", "model_config", "gpus_per_node", *named]
    assert parameters(server_module.SGLangReplica.__init__) == wanted
    assert parameters(server_module.SGLangHttpServer.launch_server) == ["master_address", "master_port"]
    generate = parameters(server_module.SGLangHttpServer.generate)
    assert generate[:3] == ["prompt_ids", "sampling_params", "request_id"]
    assert parameters(adapter_module.ServerAdapter.__init__)[0] == "config"
    source = inspect.getsource(server_module.SGLangReplica)
    assert "self.server_class" in source, "the actor's class can be chosen"
    source = inspect.getsource(server_module.SGLangHttpServer)
    for needed in ("Engine._launch_subprocesses(", "ServerArgs(**args)", "self.tokenizer_manager.generate_request("):
        assert needed in source, needed
    assert {"token_ids", "extra_fields", "stop_reason"} <= set(replica.TokenOutput.model_fields)


def test_clients_and_trainers():
    assert issubclass(llm_server.FullyAsyncLLMServerClient, llm_server.LLMServerClient)
    assert "super().generate(" in inspect.getsource(llm_server.FullyAsyncLLMServerClient.generate), "once for each part"
    assert parameters(llm_server.LLMServerManager.get_client)[0] == "client_cls"
    assert parameters(trainer_base.PPOTrainer.__init__) == ["config"]
    assert parameters(trainer_base.PPOTrainer._compute_old_log_prob) == ["batch", "metrics"]
    assert isinstance(inspect.getattr_static(trainer_base.PPOTrainer, "get_llm_client"), type(lambda: 0))


def trainer(mode: str, setting: str):
    """verl's trainer of our mode, as ``TaskRunner`` makes it."""
    rollout = "actor_rollout_ref.rollout."
    words = [f"trainer.v1.trainer_mode=sglang_pat_{mode}", f"{rollout}name=sglang_pat"]
    words += [f"{rollout}tensor_model_parallel_size=8", f"+{rollout}engine_kwargs.sglang_pat={{{setting}}}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", words)
    return trainer_base.get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
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
    assert trainer("sync", "candidates: [1, 8]").trainer_mode == "sync"


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
    for client in (llm_server.LLMServerClient, llm_server.FullyAsyncLLMServerClient):
        assert parameters(client.generate)[:2] == ["request_id", "prompt_ids"]


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
    assert parameters(saving) == parameters(loading) == []
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
    from sglang_pat.integrations.verl import adapter  # noqa: F401 - after sglang's stand-ins

    sglang_modules()
    assert replica.RolloutReplicaRegistry.get("sglang_pat").__name__ == "AdaptiveReplica"
    assert base.get_rollout_class("sglang_pat").__name__ == "AdaptiveAdapter"
    assert trainer_base.get_trainer_cls("sglang_pat_colocate_async").__name__ == "AdaptiveColocateAsync"
    assert replica.RolloutReplicaRegistry.get("sglang").__name__ == "SGLangReplica", "verl's own stays"


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)


def test_with_the_variable_the_name_sglang_means_this_engine():
    code = "import verl; from verl.workers.rollout.base import _ROLLOUT_REGISTRY as r; print(r['sglang', 'async'])"
    done = run(code, SGLANG_PAT="base_tp=1")
    assert done.stdout.strip() == "sglang_pat.integrations.verl.adapter.AdaptiveAdapter", done.stderr


def test_a_registration_that_fails_is_told():
    code = "import sys; sys.modules['transfer_queue'] = None; import verl"
    done = run(code)
    lines = [line for line in done.stderr.splitlines() if "rollout.name=sglang_pat is not there for this job" in line]
    assert len(lines) == 1 and "transfer_queue" in lines[0], done.stderr
