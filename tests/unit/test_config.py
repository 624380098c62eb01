"""Configuration: what is refused, and with which words."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_pat.config import AdaptiveConfig, parse_degrees
from sglang_pat.layout import ParallelLayout

pytestmark = pytest.mark.unit

BASE = ParallelLayout(1, 4)


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


def test_defaults():
    config = AdaptiveConfig(base=BASE)
    assert [str(layout) for layout in config.layouts] == ["tp1×dp4", "tp4×dp1"]
    assert (config.policy, config.switch_at, config.weights, config.kv) == (
        "threshold",
        8,
        "resident",
        "auto",
    )
    assert config.num_ranks == 4


def test_ranks_sit_on_gpus_in_order_unless_asked_otherwise():
    assert [AdaptiveConfig(base=BASE).place(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert [AdaptiveConfig(base=BASE, gpu_order="neighbours").place(rank) for rank in range(4)] == [0, 2, 1, 3]
    with pytest.raises(ValueError, match="--pat-gpu-order 'strided': choose one of rank, neighbours"):
        AdaptiveConfig(base=BASE, gpu_order="strided")


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(policy="best"), "--pat-policy 'best': choose one of survival, pat, threshold, schedule, manual, off"),
        (dict(policy="pat"), "--pat-policy pat needs a profile"),
        (dict(weights="gather"), "--pat-weights 'gather': choose one of resident, reshard"),
        (dict(kv=""), "--pat-kv '': choose one of auto, migrate, recompute"),
        (dict(switch_at=0), "--pat-switch-at 0: must be at least 1"),
        (dict(switch_at=-5), "--pat-switch-at -5: must be at least 1"),
        (dict(calibrate=-1), "--pat-calibrate -1: must be 0 to 1000"),
        (dict(calibrate=1001), "--pat-calibrate 1001: must be 0 to 1000"),
        (dict(degrees=(3,)), "candidate tp=3 does not divide the 4 ranks"),
        (dict(degrees=(0,)), "candidate tp=0"),
        (dict(base=ParallelLayout(2, 2), degrees=(1, 2)), "candidate tp=1 is below the base tp=2"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveConfig(**dict(base=BASE) | given)


def test_frozen_and_keyword_only():
    config = AdaptiveConfig(base=BASE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.policy = "off"
    with pytest.raises(TypeError):
        AdaptiveConfig(BASE)


@pytest.mark.parametrize(
    ("text", "degrees"), [(None, None), ("1", (1,)), ("1,2,4", (1, 2, 4)), (" 2 , 4", (2, 4)), ("-1", (-1,))]
)
def test_parse_degrees(text, degrees):
    assert parse_degrees(text) == degrees


@pytest.mark.parametrize("text", ["", "1,", "a", "1;2", "1.5", "1,2,x", "[1,2]"])
def test_parse_degrees_refuses(text):
    with pytest.raises(ValueError) as error:
        parse_degrees(text)
    assert f"--pat-candidates {text!r}: give TP degrees separated by commas" in str(error.value)
