"""What of OpenRLHF's the adapter leans on: another OpenRLHF fails here first, by name."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from on_cpu import openrlhf_cpu

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def engine():
    openrlhf_cpu.setup()
    from openrlhf.trainer.ray import vllm_engine

    return vllm_engine


def methods(actor_class) -> dict[str, list[str]]:
    stock = actor_class.__ray_metadata__.modified_class
    found = inspect.getmembers(stock, inspect.isfunction)
    return {name: list(inspect.signature(function).parameters) for name, function in found if name[0] != "_"}


def test_what_is_checked_of_their_arguments_has_their_defaults():
    from sglang_pat.integrations.openrlhf.__main__ import DEFAULTS

    source = Path(importlib.util.find_spec("openrlhf.cli.train_ppo_ray").origin).read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    found = {
        node.args[0].value: next(word.value.value for word in node.keywords if word.arg == "default")
        for node in calls
        if isinstance(node.args[0], ast.Constant) and node.args[0].value in DEFAULTS
    }
    assert found == DEFAULTS


def test_the_actor_has_the_methods_of_theirs_with_their_parameters(engine):
    from sglang_pat.integrations.openrlhf.actor import RolloutActor

    theirs, ours = methods(engine.RolloutRayActor), methods(RolloutActor)
    assert theirs and {name: ours.get(name) for name in theirs} == theirs


def test_arguments_of_an_engine(engine):
    from sglang_pat.integrations.openrlhf.actor import RolloutActor

    source = inspect.getsource(engine.create_vllm_engines)
    assert "RolloutRayActor.options(" in source, "the actor's class is looked up when engines are made"
    given = inspect.signature(RolloutActor.__ray_metadata__.modified_class.__init__).parameters
    named = {name for name, parameter in given.items() if parameter.kind is parameter.KEYWORD_ONLY}
    named -= {"given", "_ray_trace_ctx"}  # our own, and Ray's
    missing = [name for name in named if f'"{name}"' not in source and f"{name}=" not in source]
    assert not missing, "not given any more"


def test_engines_are_waited_for_before_models_are_loaded(engine, monkeypatch):
    """In the driver; one that is refused ends the job there."""
    import openrlhf.trainer.ray as where_it_looks
    import ray
    from openrlhf.cli import train_ppo_ray

    from sglang_pat.integrations.openrlhf.given import GivenArguments
    from sglang_pat.integrations.openrlhf.launcher import install

    source = inspect.getsource(train_ppo_ray)
    assert "\nfrom openrlhf.trainer.ray import create_vllm_engines\n" in source
    assert source.index("create_vllm_engines(") < source.index("init_model_from_pretrained(")
    up = [SimpleNamespace(get_num_unfinished_requests=SimpleNamespace(remote=lambda: 0)) for _ in range(2)]
    asked: list[Any] = []
    monkeypatch.setattr(engine, "RolloutRayActor", engine.RolloutRayActor)
    monkeypatch.setattr(where_it_looks, "create_vllm_engines", lambda number: up[:number])
    monkeypatch.setattr(ray, "get", asked.append)
    install(GivenArguments())
    assert where_it_looks.create_vllm_engines(2) == up and asked == [[0, 0]]


def test_agents(engine):
    """Whoever runs a rollout: how it is made and called, and what it reads from an answer."""
    from openrlhf.utils import agent

    from sglang_pat.integrations.openrlhf.actor import Completion

    assert list(inspect.signature(engine._load_agent_executor).parameters) == ["agent_func_path"]
    about = ["prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine", "images"]
    for executor in (agent.AgentExecutorBase, agent.SingleTurnAgentExecutor, agent.MultiTurnAgentExecutor):
        assert list(inspect.signature(executor.execute).parameters) == ["self", *about], executor.__name__
    read = re.findall(r"\.outputs\[0\]\.(\w+)", inspect.getsource(agent))
    assert read and set(read) <= {field.name for field in fields(Completion)}


def test_the_engine_is_told_while_agents_are_under_way(engine):
    """Also while all of them wait for a tool."""
    from sglang_pat.integrations.openrlhf.actor import RolloutActor

    kind = RolloutActor.__ray_metadata__.modified_class
    actor, told, answered = kind.__new__(kind), [], asyncio.Event()

    class Agent:
        async def execute(self, **about):
            told.append(about["prompt"])
            await answered.wait()
            return {}

    actor.executor, actor._prompts = Agent(), 0
    actor._engine = SimpleNamespace(begin_round=lambda: told.append("begin"), end_round=lambda: told.append("end"))

    async def run():
        asked = [asyncio.ensure_future(actor.generate_responses(p, "", None, 9, None, num_samples=2)) for p in "ab"]
        for _ in range(5):
            await asyncio.sleep(0)
        assert told == ["begin", "a", "a", "b", "b"]
        answered.set()
        await asyncio.gather(*asked)

    asyncio.run(run())
    assert told[-1] == "end" and told.count("end") == 1


def test_what_reaches_ray(engine, monkeypatch):
    """OpenRLHF's own environment, and our hook."""
    import ray

    from sglang_pat.integrations.openrlhf.__main__ import main

    given: list[dict[str, Any]] = []

    def init(**named: Any) -> None:
        given.append(named)
        raise InterruptedError

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(engine, "RolloutRayActor", engine.RolloutRayActor)
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(InterruptedError):
        main(["--actor.model_name_or_path", "m", "--reward.remote_url", "r", "--vllm.num_engines", "1"])
    (environment,) = (one.pop("runtime_env") for one in given)
    assert given == [{}]
    assert environment.pop("worker_process_setup_hook") == "sglang_pat.integrations.openrlhf.facade.install"
    theirs = {"TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"}
    assert environment.keys() == {"env_vars"} and environment["env_vars"].keys() >= theirs


def test_sampling_parameters_are_translated():
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.integrations.openrlhf.actor import _translate_params
    from sglang_pat.integrations.openrlhf.facade import SamplingParams as Theirs

    found = _translate_params(Theirs(max_tokens=7, min_tokens=2, top_k=5, stop=["x"], seed=3, logprobs=1))
    assert (found["max_new_tokens"], found["min_new_tokens"], found["top_k"], found["sampling_seed"]) == (7, 2, 5, 3)
    SamplingParams(**found).verify(vocab_size=100)
