"""What several contract tests need: the model that they read arguments for, and what checks requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_pat.testing import models


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return models.make_random("llama", tmp_path_factory.mktemp("models") / "llama", heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def package():
    """Where a request is checked; imported after the test's module has installed the CPU shim."""
    from sglang_pat.sglang import sampling
    from sglang_pat.sglang.server import entrance

    return SimpleNamespace(entrance=entrance, sampling=sampling)
