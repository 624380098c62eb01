"""What a job says of its engines is refused when it starts, in the words of the engine's own command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sglang_pat import job_settings, settings
from sglang_pat.layout import ParallelLayout

BAD = [
    ({"policy": "survivl"}, "--pat-policy 'survivl': choose one of survival, pat, "),
    ({"policy": "survival"}, "--pat-policy survival needs a profile: give --pat-profile FILE"),
    ({"kv": "x"}, "--pat-kv 'x': choose one of auto, "),
    ({"candidates": "many"}, "--pat-candidates 'many': give TP degrees separated by commas"),
    ({"candidates": "3"}, "candidate tp=3"),
    ({"switch_at": "0"}, "--pat-switch-at 0: must be at least 1"),
    ({"calibrate": -1}, "--pat-calibrate -1: must be 0 to"),
    ({"profile": "/nowhere"}, "profile /nowhere: No such file or directory; make one with"),
    (
        {"policy": "schedule", "schedule": "/nowhere"},
        "schedule is gone: POST the entries as a JSON list",
    ),
    ({"log": "/nowhere/log"}, "--pat-log /nowhere/log: No such file or directory; give a file that can be written"),
    ({"base_tp": 3}, "base_tp is 3, must divide the engine's 8 GPUs: 1, 2, 4, 8"),
    ({"polcy": "pat"}, " has no setting 'polcy' (did you mean 'policy'?); choose from "),
]


@pytest.mark.parametrize("given, said", BAD)
def test_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as refused:
        job_settings.check(given, 8, "here")
    line = str(refused.value)
    assert line.removeprefix("here").removeprefix(": ").startswith(said) and "\n" not in line


@pytest.mark.parametrize("given, said", [(given, said) for given, said in BAD if said.startswith("--pat")])
def test_the_command_says_the_same(given, said):
    """It makes its configuration of the same fields, and reads files in the same way."""
    found = {
        f"pat_{name}": int(value) if name in ("switch_at", "calibrate") else value for name, value in given.items()
    }
    with pytest.raises(ValueError) as refused:
        job_settings.read_files(settings.configuration(found, ParallelLayout(1, 8)))
    assert str(refused.value).startswith(said)


def test_accepted(tmp_path):
    job_settings.check({}, 8, "here")
    job_settings.check({"base_tp": 2, "candidates": [2, 8], "log": tmp_path / "log"}, 8, "here")


CONFIG = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=512, intermediate_size=128)
MODELS = [
    (
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8},
        "does not support Qwen3MoeForCausalLM: it is a mixture",
    ),
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
