"""What of a judge is refused before anything starts, in one line."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from stream_layers.judge_memory import CannotStream
from stream_layers.refusals import REFUSED, check_model, refuse_arguments, take_flag

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def variable(monkeypatch):
    monkeypatch.setenv("SGLANG_PAT_STREAM_LAYERS", "")  # to be put back
    monkeypatch.delenv("SGLANG_PAT_STREAM_LAYERS")


@pytest.fixture
def model(tmp_path):
    def write(**config) -> str:
        known = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}
        (tmp_path / "config.json").write_text(json.dumps(known | config))
        return str(tmp_path)

    return write


@pytest.mark.parametrize("flag", [["--stream-layers", "5"], ["--stream-layers=5"]])
def test_the_flag_becomes_the_variable(flag, model):
    rest = ["--model-path", model(), "--port", "1", "--stream-interval", "3"]
    assert take_flag([*rest[:2], *flag, *rest[2:]]) == rest
    assert os.environ["SGLANG_PAT_STREAM_LAYERS"] == "5"


def test_other_command_lines_stay_as_they_are():
    for argv in ([], ["--model-path", "M", "--stream-interval", "3"], ["--adaptive-tp", "--tp", "2"]):
        assert take_flag(argv) == argv
    assert "SGLANG_PAT_STREAM_LAYERS" not in os.environ


@pytest.mark.parametrize(
    "argv,line",
    [
        (
            ["--stream-layers", "2"],
            "--stream-layers is '2', must be auto or a number from 3 on: streamed layers share 2",
        ),
        (["--stream-layers", "some"], "--stream-layers is 'some', must be auto or a number from 3 on"),
        (["--stream-layers", "9"], "--stream-layers is 9, must be auto or a number from 3 to the model's 8 layers"),
        (
            ["--stream-layers", "5", "--adaptive-tp"],
            "--stream-layers is for a plain engine: leave out --stream-layers or",
        ),
    ],
)
def test_wrong_flags(argv, line, model):
    with pytest.raises(CannotStream) as caught:
        take_flag([*argv, "--model-path", model()])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    assert "SGLANG_PAT_STREAM_LAYERS" not in os.environ


@pytest.mark.parametrize(
    "config,why",
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ({"compression_config": {"format": "int"}}, "its weights are quantised"),
        ({"num_experts": 8}, "it is a mixture of experts, of which a token needs few"),
        ({"n_routed_experts": [4, 4]}, "it is a mixture of experts, of which a token needs few"),
        ({"vision_config": {"depth": 2}}, "it is multimodal"),
    ],
)
def test_models(config, why, model):
    with pytest.raises(CannotStream) as caught:
        check_model(model(**config), None, "here")
    assert str(caught.value) == (
        f"here does not support LlamaForCausalLM: {why}; choose a dense text model that is not quantised"
    )


def test_a_dense_model_passes_and_one_that_is_not_here(model):
    check_model(model(num_experts=1, quantization_config=None), 8, "here")
    check_model("no/such-model", 8, "here")
    with pytest.raises(CannotStream) as caught:
        check_model("/no/such/folder", 8, "here")
    assert str(caught.value) == "--model-path /no/such/folder: no such folder"


@pytest.fixture
def arguments(model, monkeypatch):
    monkeypatch.setenv("SGLANG_PAT_STREAM_LAYERS", "5")
    allowed = {field: values[0] for field, values, _ in REFUSED}
    return lambda **given: SimpleNamespace(**allowed | {"model_path": model()} | given)


def test_arguments(arguments):
    refuse_arguments(arguments())
    for field, _, advice in REFUSED:
        with pytest.raises(CannotStream) as caught:
            refuse_arguments(arguments(**{field: "other"}))
        flag = field.replace("_", "-")
        assert str(caught.value) == f"--stream-layers does not support --{flag} other: {advice}"
    with pytest.raises(CannotStream, match="does not support --enable-lora: leave it out"):
        refuse_arguments(arguments(enable_lora=True))
    with pytest.raises(CannotStream, match="does not support --debug-graphs: no"):
        refuse_arguments(arguments(debug_graphs=True), [("debug_graphs", (False,), "no")])


def test_the_variable_alone_is_checked_with_the_model(arguments, monkeypatch):
    monkeypatch.setenv("SGLANG_PAT_STREAM_LAYERS", "9")
    with pytest.raises(CannotStream, match="must be auto or a number from 3 to the model's 8 layers"):
        refuse_arguments(arguments())
