"""What a verl job may say about the engine, and what a sample says of its tokens; nothing of verl is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sglang_pat.integrations.verl import fields, options


def config(tp: int = 8, settings: object = None, **changed) -> SimpleNamespace:
    made = SimpleNamespace(
        name="sglang",
        engine_kwargs={"sglang_pat": settings} if settings is not None else {},
        tensor_model_parallel_size=tp,
        data_parallel_size=1,
        pipeline_model_parallel_size=1,
        disaggregation=SimpleNamespace(enabled=False),
    )
    vars(made).update(changed)
    return made


@pytest.mark.parametrize("made", [config(), config(4), config(8, {"base_tp": 2, "policy": "threshold"}), config(1)])
def test_accepted(made):
    options.check(made, gpus_per_node=8)
    options.check(made)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            config(8, {"polcy": "pat"}),
            "rollout.engine_kwargs.sglang_pat has no setting 'polcy' (did you mean 'policy'?); choose from",
        ),
        (
            config(8, {"log": "/nowhere/log"}),
            "rollout.engine_kwargs.sglang_pat: --pat-log /nowhere/log.0: No such file",
        ),
        (config(8, {"base_tp": 3}), "rollout.engine_kwargs.sglang_pat: base_tp is 3, must divide the engine's 8 GPUs"),
        (config(8, "base_tp=1"), "rollout.engine_kwargs.sglang_pat is 'base_tp=1', must be settings by name"),
        (config(16), "rollout.tensor_model_parallel_size is 16, must divide the node's 8 GPUs: 1, 2, 4, 8"),
        (config(3), "rollout.tensor_model_parallel_size is 3, must divide the node's 8 GPUs: 1, 2, 4, 8"),
        (config(8, {}, name="vllm"), "rollout.name is vllm, must be sglang_pat or sglang: rollout.engine_kwargs"),
        (config(data_parallel_size=2), "rollout.data_parallel_size is 2, must be 1"),
        (config(pipeline_model_parallel_size=2), "rollout.pipeline_model_parallel_size is 2, must be 1"),
        (config(disaggregation=SimpleNamespace(enabled=True)), "rollout.disaggregation.enabled is true, must be false"),
    ],
)
def test_refused_in_one_line(made, line):
    with pytest.raises(ValueError) as refused:
        options.check(made, gpus_per_node=8)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_routing_replay_of_a_model_that_tells_its_experts(tmp_path):
    model = SimpleNamespace(path=str(tmp_path), lora_rank=0)
    shape = {"num_attention_heads": 8, "num_hidden_layers": 2, "hidden_size": 64, "num_local_experts": 8}
    shape |= {"num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 64, "vocab_size": 503}
    for name in ("Qwen3MoeForCausalLM", "MixtralForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps(shape | {"architectures": [name]}))
        options.check(config(), gpus_per_node=8, model=model)
        if name.startswith("Qwen3"):
            options.check(config(enable_rollout_routing_replay=True), gpus_per_node=8, model=model)
    with pytest.raises(ValueError, match="rollout.enable_rollout_routing_replay is true: cannot be had of Mixtral"):
        options.check(config(enable_rollout_routing_replay=True), gpus_per_node=8, model=model)


@pytest.mark.parametrize(
    ("made", "variable", "policy"),
    [
        (config(), None, False),
        (config(settings={}), None, True),
        (config(settings={"base_tp": 2}), None, True),
        (config(), "", True),
        (config(name="sglang_pat"), None, True),
        (config(name="vllm"), "base_tp=1", False),
    ],
)
def test_which_replicas_are_adaptive(made, variable, policy, monkeypatch):
    """Replicas of the policy that are asked for in one of three ways are; of a reward model and a teacher none."""
    if variable is not None:
        monkeypatch.setenv("SGLANG_PAT", variable)
    assert options.is_adaptive(made, helper=False) == policy
    if options.get_own_settings(made) is None:
        assert not options.is_adaptive(made, helper=True)
    else:
        line = "rollout.engine_kwargs.sglang_pat is given for a reward model or a teacher, must be left out there"
        with pytest.raises(ValueError, match=line):
            options.is_adaptive(made, helper=True)


def test_a_reward_model_may_stream_layers(tmp_path):
    made = config(settings={"stream_layers": "auto"})
    assert not options.is_adaptive(made, helper=True) and options.read_stream_setting(made) == "auto"
    assert options.read_stream_setting(config(settings={"stream_layers": 12})) == "12"
    assert options.read_stream_setting(config()) is None
    line = "rollout.engine_kwargs.sglang_pat.stream_layers is for a reward model or a teacher, must be left out here"
    with pytest.raises(ValueError, match=line):
        options.is_adaptive(made, helper=False)
    with pytest.raises(ValueError, match=r"sglang_pat.stream_layers is '2', must be auto or a number from 3 on"):
        options.read_stream_setting(config(settings={"stream_layers": 2}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Llama"], "num_hidden_layers": 8}))
    with pytest.raises(
        ValueError, match=r"stream_layers is 9, must be auto or a number from 3 to the model's 8 layers"
    ):
        options.read_stream_setting(config(settings={"stream_layers": 9}), str(tmp_path))


def test_the_configuration_goes_before_the_variable(monkeypatch):
    monkeypatch.setenv("SGLANG_PAT", "base_tp=2,policy=pat")
    assert options.read_settings(config(settings={"policy": "threshold"})) == {"base_tp": "2", "policy": "threshold"}


def test_each_engine_writes_its_own_log():
    made = config(settings={"log": "/tmp/decisions.jsonl"})
    assert [options.read_settings(made, replica)["log"] for replica in (0, 3, None)] == [
        "/tmp/decisions.0.jsonl", "/tmp/decisions.3.jsonl", "/tmp/decisions.jsonl",
    ]  # fmt: skip


def test_runs_of_a_response_in_parts():
    parts = [(10, [(0, 1), (4, 2)]), (0, [(0, 1)]), (5, [(0, 2), (3, 1)]), (2, [(0, 1)])]
    runs = fields.join_spans(parts)
    assert runs == ((0, 1), (4, 2), (13, 1))
    assert fields.expand_runs(runs, 17) == [1] * 4 + [2] * 9 + [1] * 4
    assert fields.expand_runs(runs, 5) == [1] * 4 + [2], "cut by verl"
    assert fields.join_spans([]) == () and fields.expand_runs((), 0) == []


def test_runs_of_a_response_in_turns():
    turns = fields.Turns(prompt=20)
    turns.add(0, 5, [(0, 1), (3, 2)])
    turns.add(8, 4, [(0, 2)])
    turns.add(12, 2, [(0, 2), (1, 4)])
    assert turns == [(0, 1), (3, 2), (5, None), (8, 2), (13, 4)]
    assert fields.expand_runs(turns, 14) == [1] * 3 + [2] * 2 + [None] * 3 + [2] * 5 + [4]
    turns.add(13, 3, [(0, 1)])
    assert turns[-2:] == [(8, 2), (13, 1)], "the last token of the turn before was cut off"
    empty = fields.Turns()
    empty.add(0, 0, [(0, 1)])
    empty.add(3, 1, [(0, 1)])
    assert empty == [(0, None), (3, 1)]
