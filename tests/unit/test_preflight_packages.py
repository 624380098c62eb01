"""Preflight names what is missing or unfit: packages that ``pip install --no-deps`` leaves out, FastAPI, a sandbox."""

from __future__ import annotations

from importlib import metadata

import pytest

from reward_sandbox import sandbox
from sglang_pat import preflight

pytestmark = pytest.mark.unit


def test_a_package_that_is_not_there(monkeypatch):
    lines = ["sglang<=0.5.12.post1,>=0.5.12", "matplotlib", "none-of-that_name>=2; python_version>'3'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert list(preflight._check_packages()) == [
        (True, "matplotlib", metadata.version("matplotlib")),
        (False, "none-of-that_name", "not installed: pip install none-of-that_name"),
    ]


def test_a_fastapi_whose_routes_have_no_path(monkeypatch):
    """FastAPI 0.165: a router that was included is a route of its own."""
    import fastapi

    assert preflight._check_web() == (True, "FastAPI", metadata.version("fastapi"))
    monkeypatch.setattr(fastapi.FastAPI, "routes", [object()])
    assert "SGLang answers /v1/loads with 500" in preflight._check_web()[2]


def test_a_package_of_an_extra_is_not_missed(monkeypatch):
    lines = ["none-of-that-name; platform_machine == 'x86_64' and extra == 'rewards'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert not list(preflight._check_packages())


def test_a_sandbox_that_does_not_start_is_said_and_fails_nothing(monkeypatch):
    monkeypatch.setattr(sandbox, "_find_bwrap", lambda: iter([]))
    fine, what, found = preflight._check_sandbox()
    assert fine and what == "sandbox of rewards" and "or write sandbox: none" in found
