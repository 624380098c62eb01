"""What contract tests need: SGLang, on a machine without CUDA too; the model that they read arguments for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from sglang_pat.cpu import shim
from sglang_pat.testing import models
from sglang_pat.testing.prefork import run

shim.ensure()  # before any test file imports SGLang


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return models.make_random("llama", tmp_path_factory.mktemp("models") / "llama", heads=8, kv_heads=4)


@pytest.fixture
def run_code(prefork, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs code as a program of its own that has imported SGLang already."""

    def run_program(code: str, *argv: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        (tmp_path / "program.py").write_text(code)
        places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        return run(prefork, "program", list(map(str, argv)), os.environ | {"PYTHONPATH": places} | (env or {}), 500)

    return run_program
