"""A switch in steady state makes nothing that could have been made at start (PAT, section 4.3).

Every server of the engine tests checks it (``tests/engine/conftest.CHECKS``); here, that the check can fail.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from sglang_pat.checks import steady
from sglang_pat.host import adapter


def test_what_is_to_be_made_at_start_is_refused_in_a_switch(monkeypatch):
    before = dist.new_group
    monkeypatch.setenv(steady.CHECK_STEADY_ENV, "1")
    with (
        steady.forbid_new_resources(),
        pytest.raises(RuntimeError, match="a switch called torch.distributed.new_group"),
    ):
        dist.new_group([0])
    for owner, name in adapter.runner.RESOURCE_MAKERS:
        with steady.forbid_new_resources(), pytest.raises(RuntimeError, match=f"a switch called .*{name}"):
            getattr(owner, name)()
    assert dist.new_group is before


def test_nothing_is_patched_without_the_variable(monkeypatch):
    monkeypatch.delenv(steady.CHECK_STEADY_ENV, raising=False)
    before = dist.new_group
    with steady.forbid_new_resources():
        assert dist.new_group is before
