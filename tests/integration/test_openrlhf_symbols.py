"""What of OpenRLHF's the adapter leans on: another OpenRLHF fails here first, by name."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from on_cpu import openrlhf_cpu

from sglang_pat.messages import BeginRound, EndRound

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
    named -= {"job_arguments", "_ray_trace_ctx"}  # our own, and Ray's
    missing = [name for name in named if f'"{name}"' not in source and f"{name}=" not in source]
    assert not missing, "not given any more"


def test_engines_are_waited_for_before_models_are_loaded(engine, monkeypatch):
    """The driver waits; an engine that is refused ends the job there."""
    import openrlhf.trainer.ray as where_it_looks
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


class Engines:
    """One or more, which note what they are told and asked; a reward is 0 at first, then 1."""

    def __init__(self, monkeypatch, number: int = 1) -> None:
        from openrlhf.trainer.ppo_utils import samples_generator

        self.told: list[Any] = []
        self.scores = itertools.chain([0.0], itertools.repeat(1.0))
        for module in (samples_generator.ray, ray):
            monkeypatch.setattr(module, "get", lambda found: found)
            monkeypatch.setattr(module, "wait", lambda refs, **_: (refs[:1], refs[1:]))
        named = {name: SimpleNamespace(remote=getattr(self, name)) for name in (
            "announce_round", "generate_responses", "get_num_unfinished_requests"
        )}  # fmt: skip
        self.all = [SimpleNamespace(**named) for _ in range(number)]

    def announce_round(self, message) -> None:
        self.told.append(message)

    def get_num_unfinished_requests(self) -> int:
        return 0

    def generate_responses(self, prompt, num_samples, **_) -> list[Any]:
        self.told.append(prompt)
        return [SimpleNamespace(scores=[torch.tensor(next(self.scores))])] * num_samples


def make_generator(engines: Engines, filters: bool = False):
    from sglang_pat.integrations.openrlhf.generator import RoundGenerator

    args = {
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 4}, "vllm": {"enable_sleep": False},
        "algo": {"dynamic_filtering_enable": filters, "dynamic_filtering_range": (0.5, 2.0),
                 "advantage": {"is_correction_level": "off"}},
    }  # fmt: skip
    args = json.loads(json.dumps(args), object_hook=lambda found: SimpleNamespace(**found))
    data, other = ([(None, [name], [""], [None]) for name in names] for names in ("abcd", "xyz"))
    made = RoundGenerator(SimpleNamespace(args=args), data, other, None, engines.all)
    made._process_response_into_experience = lambda response, **_: response
    return made


def test_engines_are_told_of_each_round(engine, monkeypatch):
    """A round lasts from its first prompt until all agents are done, also if all of these wait for a tool."""
    engines = Engines(monkeypatch)
    generator = make_generator(engines)
    generator.generate_samples(max_new_tokens=9)
    begun = BeginRound(requests=8, prompts=2, max_new_tokens=9)
    assert engines.told == [begun, "a", "b", EndRound()]
    engines.told.clear()
    generator.generate_eval_samples(max_len=99, n_samples_per_prompt=3)
    of_two, of_one = (
        BeginRound(requests=3 * prompts, prompts=prompts, max_new_tokens=99, kind="validation") for prompts in (2, 1)
    )
    assert engines.told == [of_two, "x", "y", EndRound(), of_one, "z", EndRound()]
    engines.told.clear()
    generator.generate_samples(max_new_tokens=9)
    assert engines.told == [begun, "c", "d", EndRound()]


def test_a_size_that_nobody_knows_is_not_told(engine, monkeypatch):
    engines = Engines(monkeypatch)
    make_generator(engines, filters=True).generate_samples(max_new_tokens=9)
    assert engines.told == [BeginRound(max_new_tokens=9), "a", "b", "c", EndRound()], "c in place of a"
    engines = Engines(monkeypatch, number=2)
    make_generator(engines).generate_samples(max_new_tokens=9)
    assert engines.told == [BeginRound(max_new_tokens=9)] * 2 + ["a", "b"] + [EndRound()] * 2


def test_where_their_trainers_find_a_generator(engine):
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async

    for module, maker in (ppo_trainer, "PPOTrainer"), (ppo_trainer_async, "GenerateSamplesActor"):
        stock = getattr(module, maker).__ray_metadata__.modified_class
        assert "self.samples_generator = SamplesGenerator(" in inspect.getsource(stock.__init__)


def test_what_reaches_ray(engine, monkeypatch):
    """OpenRLHF's own environment, and our hook."""
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
    for name, value in (("n", 4), ("logprobs", 5)):
        with pytest.raises(ValueError, match=f"^{name} of SamplingParams is {value}, must be 1"):
            _translate_params(Theirs(**{name: value}))
