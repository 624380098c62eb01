"""What contract tests need: SGLang, on a machine without CUDA too; the model that they read arguments for."""

from __future__ import annotations

import pytest

from sglang_pat.cpu import shim
from sglang_pat.testing import models

shim.ensure()  # before any test file imports SGLang


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return models.make_random("llama", tmp_path_factory.mktemp("models") / "llama", heads=8, kv_heads=4)
