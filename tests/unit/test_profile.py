"""Profiles on disk: written whole or not at all, and refused with one clear line."""

from __future__ import annotations

import os

import msgspec
import pytest

from sglang_pat.predict.profile import INFORMATIVE, Profile, ProfileError, check_fits, load, save

from .profiles_for_tests import FINGERPRINT, profile, switch_sample

pytestmark = pytest.mark.unit


def another(name: str):
    value = getattr(FINGERPRINT, name)
    return value + 1 if isinstance(value, int) else value[:-1] if isinstance(value, tuple) else f"not {value}"


def get_refusal(call, *arguments) -> str:
    with pytest.raises(ProfileError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_round_trip(tmp_path):
    written = profile(
        machine={"cores": 2, "load": 0.5, "kernel": "6.1"},
        sources=("somewhere",),
        grid={"batch": [1, 2]},
        switches=(switch_sample(1, 4, 2, 100, kv=1e-3, drain=0.1 + 0.2),),
    )
    save(written, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == written
    assert os.listdir(tmp_path) == ["p.json"]


def test_refuses_a_missing_file(tmp_path):
    message = get_refusal(load, tmp_path / "none.json")
    assert "none.json" in message and "No such file" in message and "profiler.sweep" in message


@pytest.mark.parametrize("name", INFORMATIVE)
def test_sizes_that_do_not_change_a_time_may_differ(name):
    check_fits(profile(), msgspec.structs.replace(FINGERPRINT, **{name: another(name)}))


@pytest.mark.parametrize("name", [name for name in FINGERPRINT.__struct_fields__ if name not in INFORMATIVE])
def test_refuses_another_deployment(name):
    theirs, ours = getattr(FINGERPRINT, name), another(name)
    message = get_refusal(check_fits, profile(), msgspec.structs.replace(FINGERPRINT, **{name: ours}), "p.json")
    assert f"{name}={theirs!r}" in message and repr(ours) in message and "p.json" in message


def test_refuses_an_interrupted_sweep():
    assert "interrupted" in get_refusal(check_fits, profile(complete=False), FINGERPRINT, "p.json")
    assert Profile(fingerprint=FINGERPRINT).complete is False
