"""Profiles on disk: written whole or not at all, and refused with one clear line."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from sglang_pat.predict import profile as module
from sglang_pat.predict.profile import INFORMATIVE, Profile, ProfileError, check_fits, load, save

from .profiles_for_tests import FINGERPRINT, profile, switch_sample

pytestmark = pytest.mark.unit

OTHER = dict(
    model="another",
    dtype="bfloat16",
    device="H100",
    attention="triton",
    num_ranks=8,
    base_tp=2,
    degrees=(1, 4),
    link="10 GB/s",
    weights="reshard",
    kv_exchange="allgather",
    kv_tokens=1,
    max_running=2,
    sglang="0.6",
    torch="3.0",
    package="9.9",
)


def refused(call, *arguments) -> str:
    """The one line with which it is refused."""
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


def test_a_file_with_more_in_it_still_loads(tmp_path):
    """Profiles have told what building a layout took."""
    save(profile(), tmp_path / "p.json")
    written = json.loads((tmp_path / "p.json").read_text()) | {"setup": [{"tp": 4, "groups_seconds": 1}]}
    (tmp_path / "p.json").write_text(json.dumps(written))
    assert load(tmp_path / "p.json") == profile()


def test_the_file_is_for_people_too(tmp_path):
    save(profile(), tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert text.count("\n") > 100 and json.loads(text)["fingerprint"]["num_ranks"] == 4


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    save(profile(), tmp_path / "p.json")
    before = (tmp_path / "p.json").read_bytes()

    def no_space(*_):
        raise OSError("no space")

    monkeypatch.setattr(module.os, "replace", no_space)
    with pytest.raises(OSError, match="no space"):
        save(profile(complete=False), tmp_path / "p.json")
    assert (tmp_path / "p.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["p.json"]


def test_refuses_a_missing_file(tmp_path):
    message = refused(load, tmp_path / "none.json")
    assert "none.json" in message and "No such file" in message and "profiler.sweep" in message


def test_fits_its_own_deployment():
    check_fits(profile(), FINGERPRINT)


def test_every_field_of_the_fingerprint_is_tried():
    assert set(OTHER) == set(FINGERPRINT.__struct_fields__)


@pytest.mark.parametrize("name", INFORMATIVE)
def test_sizes_that_do_not_change_a_time_may_differ(name):
    check_fits(profile(), msgspec.structs.replace(FINGERPRINT, **{name: OTHER[name]}))


@pytest.mark.parametrize("name", [name for name in FINGERPRINT.__struct_fields__ if name not in INFORMATIVE])
def test_refuses_another_deployment(name):
    theirs, ours = getattr(FINGERPRINT, name), OTHER[name]
    message = refused(check_fits, profile(), msgspec.structs.replace(FINGERPRINT, **{name: ours}), "p.json")
    assert f"{name}={theirs!r}" in message and repr(ours) in message and "p.json" in message


def test_refuses_an_interrupted_sweep():
    assert "interrupted" in refused(check_fits, profile(complete=False), FINGERPRINT, "p.json")
    assert Profile(fingerprint=FINGERPRINT).complete is False
