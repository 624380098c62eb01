"""What of OpenRLHF's the adapter leans on: another OpenRLHF fails here first, by name."""

from __future__ import annotations

import inspect

import pytest

from sglang_pat.testing import openrlhf_cpu

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


def test_names_of_vllm(engine):
    from openrlhf.trainer.ppo_utils import samples_generator
    from openrlhf.utils import distributed_util

    from sglang_pat.integrations.openrlhf import facade

    assert samples_generator.SamplingParams is facade.SamplingParams
    group = distributed_util.stateless_init_process_group
    assert list(inspect.signature(group).parameters) == [
        "master_address", "master_port", "rank", "world_size", "device",
    ]  # fmt: skip


def test_sampling_parameters_are_translated():
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.integrations.openrlhf.actor import _translated
    from sglang_pat.integrations.openrlhf.facade import SamplingParams as Theirs

    found = _translated(Theirs(max_tokens=7, min_tokens=2, top_k=5, stop=["x"], seed=3, logprobs=1))
    assert (found["max_new_tokens"], found["min_new_tokens"], found["top_k"], found["sampling_seed"]) == (7, 2, 5, 3)
    SamplingParams(**found).verify(vocab_size=100)
