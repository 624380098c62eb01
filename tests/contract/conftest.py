"""The model that the contract tests read arguments for."""

from __future__ import annotations

import pytest

from sglang_pat.testing import models


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return models.make_random("llama", tmp_path_factory.mktemp("models") / "llama", heads=8, kv_heads=4)
