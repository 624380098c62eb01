"""Preflight names a package that ``pip install --no-deps`` has left out."""

from __future__ import annotations

from importlib import metadata

import pytest

from sglang_pat import preflight

pytestmark = pytest.mark.unit


def test_a_package_that_is_not_there(monkeypatch):
    lines = ["sglang<=0.5.12.post1,>=0.5.12", "matplotlib", "none-of-that_name>=2; python_version>'3'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert list(preflight._packages()) == [
        (True, "matplotlib", metadata.version("matplotlib")),
        (False, "none-of-that_name", "not installed: pip install none-of-that_name"),
    ]
