"""The settings of the adaptive engine, by name and as a configuration, and what a job says of them when it starts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

from sglang_pat import job_settings, settings
from sglang_pat.config import AdaptiveConfig
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.registry import make_policy

pytestmark = pytest.mark.unit

BASE = ParallelLayout(1, 4)


@pytest.mark.parametrize(
    "text, given",
    [
        ("", {}),
        ("base_tp=1", {"base_tp": "1"}),
        ("base_tp=1, candidates=1,2,4, policy=pat", {"base_tp": "1", "candidates": "1,2,4", "policy": "pat"}),
        ("log=/a=b.jsonl", {"log": "/a=b.jsonl"}),
    ],
)
def test_the_variable_as_a_mapping(text, given):
    assert settings.parse(text, "HERE") == given


def test_a_variable_without_names_is_refused():
    with pytest.raises(ValueError, match="HERE='yes': write settings as name=value"):
        settings.parse("yes", "HERE")


def test_values_have_the_types_of_the_fields():
    given = {"base_tp": "2", "switch_at": "4", "cpu_overlap": "True", "candidates": [2, 4], "profile": None}
    assert settings.parse_fields(given, "here") == {
        "base_tp": 2,
        "pat_switch_at": 4,
        "pat_cpu_overlap": True,
        "pat_candidates": "2,4",
        "pat_profile": None,
    }


def test_values_as_yaml_has_them():
    """``null`` and ``off``."""
    given = {name: None for name in settings._NAMED}
    config = job_settings.check(given, 4, "here")
    assert config == job_settings.check({}, 4, "here") and config.speculate == "off"
    assert job_settings.check({"policy": False, "speculate": False}, 4, "here").policy == "off"


@pytest.mark.parametrize(
    "where, elsewhere",
    [
        ("rollout.engine_kwargs.sglang_pat", "rollout.engine_kwargs.sglang"),
        ("--sglang_pat", "--sglang"),
        ("SGLANG_PAT", "the launcher's own arguments"),
    ],
)
def test_arguments_of_sglangs_have_their_place_elsewhere(where, elsewhere):
    """verl's convention is ``engine_kwargs.<rollout.name>``."""
    with pytest.raises(ValueError) as error:
        settings.parse_fields({"device": "cpu"}, where)
    line = str(error.value)
    assert line.startswith(f"{where} has no setting 'device'; choose from base_tp, ")
    assert line.endswith(f". SGLang's own are given with {elsewhere}")


BAD = [
    ({"policy": "survivl"}, "--pat-policy 'survivl': choose one of survival, pat, "),
    ({"policy": "survival"}, "--pat-policy survival needs a profile: give --pat-profile FILE"),
    ({"weights": "gather"}, "--pat-weights 'gather': choose one of resident, reshard"),
    ({"candidates": "many"}, "--pat-candidates 'many': give TP degrees separated by commas"),
    ({"candidates": "1,"}, "--pat-candidates '1,': give TP degrees separated by commas"),
    ({"candidates": "3"}, "candidate tp=3 does not divide the 8 ranks"),
    ({"switch_at": "0"}, "--pat-switch-at 0: must be at least 1"),
    ({"calibrate": 1001}, "--pat-calibrate 1001: must be 0 to 1000"),
    ({"profile": "/nowhere"}, "profile /nowhere: No such file or directory; make one with"),
    ({"policy": "schedule", "schedule": "/nowhere"}, " has no setting 'schedule'"),
    ({"log": "/nowhere/log"}, "--pat-log /nowhere/log: No such file or directory; give a file that can be written"),
    ({"base_tp": 2, "candidates": "1,2"}, "candidate tp=1 is below the base tp=2"),
    ({"base_tp": 3}, "base_tp is 3, must divide the engine's 8 GPUs: 1, 2, 4, 8"),
    ({"polcy": "pat"}, " has no setting 'polcy' (did you mean 'policy'?); choose from base_tp, candidates, "),
    ({"switch_at": 2.5}, "switch_at is 2.5, must be a whole number"),
    ({"cpu_overlap": "perhaps"}, "cpu_overlap is 'perhaps', must be true or false"),
]


@pytest.mark.parametrize("given, said", BAD)
def test_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as refused:
        job_settings.check(given, 8, "here")
    line = str(refused.value)
    assert line.removeprefix("here").removeprefix(": ").startswith(said) and "\n" not in line


def test_settings_and_configuration_have_the_same_defaults():
    base = ParallelLayout(1, 4)
    assert settings.make_configuration({}, base) == AdaptiveConfig(base=base)
    found = settings.parse_fields({"candidates": [1, 4], "switch_at": "3", "kv": "migrate", "cpu_overlap": "1"}, "here")
    assert settings.make_configuration(found, base, 7) == AdaptiveConfig(
        base=base, degrees=(1, 4), switch_at=3, kv="migrate", max_running=7
    )


def test_the_configuration_has_the_defaults_of_the_flags():
    """The replay and tests make it without flags."""
    own = {field.name: field.default for field in dataclasses.fields(AdaptiveConfig)}
    shared = {setting.name: setting.default for setting in settings.SETTINGS if setting.name in own}
    assert shared.pop("policy") is None and len(shared) > 8  # which policy it is depends on the profile there
    assert shared == {name: own[name] for name in shared}
    assert inspect.signature(make_policy).parameters["switch_at"].default == own["switch_at"]


# -- as a configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "degrees"),
    [
        ({}, [1, 8]),  # threshold goes from the lowest to the highest only
        ({"policy": "off"}, [1, 2, 4, 8]),
        ({"policy": "threshold", "profile": "p"}, [1, 2, 4, 8]),  # by which a planner may choose others
        ({"policy": "survival", "profile": "p"}, [1, 2, 4, 8]),
        ({"degrees": (1, 2, 8)}, [1, 2, 8]),
        ({"base": ParallelLayout(8, 1)}, [8]),
    ],
)
def test_default_candidates_are_those_that_somebody_goes_to(options, degrees):
    config = AdaptiveConfig(**{"base": ParallelLayout(1, 8)} | options)
    assert [layout.tp for layout in config.layouts] == degrees


def test_ranks_sit_on_gpus_in_order_unless_asked_otherwise():
    assert [AdaptiveConfig(base=BASE).get_gpu_index(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert [AdaptiveConfig(base=BASE, gpu_order="neighbours").get_gpu_index(rank) for rank in range(4)] == [0, 2, 1, 3]


def test_degrees():
    config = AdaptiveConfig(base=BASE, degrees=(4,))
    assert [layout.tp for layout in config.layouts] == [1, 4]
    assert config.layout(4) == ParallelLayout(4, 1)
    with pytest.raises(ValueError, match=r"tp=2 is not a candidate; choose one of \[1, 4\]"):
        config.layout(2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(), True),
        (dict(policy="threshold"), False),
        (dict(profile_as_is=True), False),
        (dict(calibrate=0), False),
        (dict(degrees=(1,)), False),
    ],
)
def test_who_calibrates(given, expected):
    """Who corrects a profile, and has something to choose from."""
    assert AdaptiveConfig(**dict(base=BASE, policy="survival", profile="-") | given).calibrates == expected


# -- of a job ---------------------------------------------------------------------------------------------------------


def test_accepted(tmp_path):
    job_settings.check({}, 8, "here")
    job_settings.check({"base_tp": 2, "candidates": [2, 8], "log": tmp_path / "log"}, 8, "here")


CONFIG = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=512, intermediate_size=128)
MODELS = [
    ({"architectures": ["OlmoeForCausalLM"], "num_experts": 8}, "does not support OlmoeForCausalLM: it is a mixture"),
    ({"kv_lora_rank": 512}, "does not support ?: its attention is MLA"),
    ({"text_config": {}, "vision_config": {"depth": 2}}, "it is multimodal"),
    ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised (fp8)"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "some of its layers are recurrent"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "some of its layers have a sliding window"),
    ({"num_attention_heads": 3, "hidden_size": 96}, "tp=2 does not divide the model's 3 attention heads; choose other"),
]


@pytest.mark.parametrize("fields, said", MODELS)
def test_a_model_is_refused_by_its_config(fields, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
    config = job_settings.check({"base_tp": 2}, 4, "here")
    with pytest.raises(ValueError) as refused:
        job_settings.check_model(str(tmp_path), config, "model.path")
    line = str(refused.value)
    assert line.startswith(f"model.path {tmp_path}: ") and said in line and "\n" not in line


@pytest.mark.parametrize("fields", [{}, {"num_experts": 1}, {"layer_types": ["full_attention"]}, {"hidden_size": None}])
def test_a_model_of_which_nothing_is_wrong_to_see(fields, tmp_path):
    """What only its class or SGLang know is left to the engine; so is a degree that it may leave out."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 2} | fields))
    config = job_settings.check({}, 4, "here")
    job_settings.check_model(str(tmp_path), config, "model.path")
    job_settings.check_model(str(tmp_path / "elsewhere"), config, "model.path")
    job_settings.check_model("nobody/has-it", config, "model.path")


@pytest.mark.parametrize(
    "name, why", [("MixtralForCausalLM", "whose layers have no numbers"), ("Qwen3ForCausalLM", "which has no experts")]
)
def test_a_model_that_does_not_tell_its_routed_experts(name, why, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": [name]}))
    with pytest.raises(ValueError, match=f"routing is true: cannot be had of {name}, {why}.*; leave it out"):
        job_settings.check_routed_experts(str(tmp_path), "routing is true")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Qwen3MoeForCausalLM"]}))
    job_settings.check_routed_experts(str(tmp_path), "routing is true")
    job_settings.check_routed_experts("nobody/has-it", "routing is true")


def test_sglangs_own_arguments():
    job_settings.check_flags({"page_size": 1, "device": "cpu", "enable_lora": False, "no_such": 3}, "--sglang.")
    with pytest.raises(
        ValueError, match=r"^--sglang.page_size is 16, which an adaptive .* \(tokens move .*\): must be 1;"
    ):
        job_settings.check_flags({"page_size": 16}, "--sglang.")


def test_no_sglang_is_needed_for_that():
    """verl's trainer, whose process does not import it, checks its job so."""
    code = "import sys; from sglang_pat import job_settings; assert not {'sglang', 'torch'} & {*sys.modules}"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
