"""The settings of the adaptive engine by name, as frameworks and ``SGLANG_PAT`` give them."""

import dataclasses
import inspect

import pytest

from sglang_pat import settings
from sglang_pat.config import AdaptiveConfig
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.registry import make_policy


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
    assert settings.fields(given, "here") == {
        "base_tp": 2,
        "pat_switch_at": 4,
        "pat_cpu_overlap": True,
        "pat_candidates": "2,4",
        "pat_profile": None,
    }


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
        settings.fields({"device": "cpu"}, where)
    line = str(error.value)
    assert line.startswith(f"{where} has no setting 'device'; choose from base_tp, ")
    assert line.endswith(f". SGLang's own are given with {elsewhere}")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"polcy": "pat"}, "here has no setting 'polcy' (did you mean 'policy'?); choose from base_tp, candidates, "),
        ({"switch_at": "soon"}, "here: switch_at is 'soon', must be a whole number"),
        ({"switch_at": 2.5}, "here: switch_at is 2.5, must be a whole number"),
        ({"cpu_overlap": "perhaps"}, "here: cpu_overlap is 'perhaps', must be true or false"),
        ({"policy": "survivl"}, "here: --pat-policy 'survivl': choose one of survival, pat, threshold, "),
        ({"kv": "x"}, "here: --pat-kv 'x': choose one of auto, migrate, recompute"),
    ],
)
def test_what_is_no_setting_is_refused_in_one_line(given, message):
    with pytest.raises(ValueError) as error:
        settings.fields(given, "here")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_the_variable_is_named_for_what_is_wrong_in_it(monkeypatch):
    monkeypatch.setenv("SGLANG_PAT", "base_tp=1,policy=survivl")
    with pytest.raises(ValueError, match="^SGLANG_PAT: --pat-policy 'survivl': choose one of survival, "):
        settings.of_environment()


def test_settings_and_configuration_have_the_same_defaults():
    base = ParallelLayout(1, 4)
    assert settings.configuration({}, base) == AdaptiveConfig(base=base)
    found = settings.fields({"candidates": [1, 4], "switch_at": "3", "kv": "migrate", "cpu_overlap": "1"}, "here")
    assert settings.configuration(found, base, 7) == AdaptiveConfig(
        base=base, degrees=(1, 4), switch_at=3, kv="migrate", max_running=7
    )


@pytest.mark.parametrize("base_tp, ranks, layout", [(1, 8, (1, 8)), (2, 8, (2, 4)), (8, 8, (8, 1))])
def test_the_base_layout(base_tp, ranks, layout):
    assert settings.base_layout(base_tp, ranks, "here") == layout


@pytest.mark.parametrize("base_tp", [0, -1, 3, 16])
def test_a_base_degree_that_does_not_divide_the_gpus(base_tp):
    with pytest.raises(ValueError, match=f"here: base_tp is {base_tp}, must divide the engine's 8 GPUs: 1, 2, 4, 8"):
        settings.base_layout(base_tp, 8, "here")


def test_each_name_is_defined_once():
    names = [setting.name for setting in (settings.BASE_TP, *settings.SETTINGS)]
    assert len(names) == len(set(names))


def test_the_configuration_has_the_defaults_of_the_flags():
    """It is made without flags, too: by the replay and in tests."""
    own = {field.name: field.default for field in dataclasses.fields(AdaptiveConfig)}
    shared = {setting.name: setting.default for setting in settings.SETTINGS if setting.name in own}
    assert shared.pop("policy") is None and len(shared) > 8  # which policy it is depends on the profile there
    assert shared == {name: own[name] for name in shared}
    assert inspect.signature(make_policy).parameters["switch_at"].default == own["switch_at"]
