"""The other SGLang that is accepted: the contract holds for it too, and it switches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pat.version import SGLANG_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.prefix) / "other_sglang"
"""Where ``make test-integration`` has put it, for the SGLang that ``make setup`` installs."""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not FOLDER.exists(), reason="this environment is of another SGLang itself"),
]


def run(*command: str) -> str:
    """What a command prints that finds the other SGLang first."""
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_it_is_the_other_one():
    code = "from sglang_pat.launch.contract import get_installed_version; print(get_installed_version())"
    found = run("-c", code).strip()
    assert found in SGLANG_VERSIONS and found != SGLANG_VERSIONS[0]


SMOKE = pytest.param("engine/test_smoke.py", marks=pytest.mark.long)


@pytest.mark.parametrize("path", ["contract/test_sglang_contract.py", SMOKE])
def test_it_passes(path):
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{path}")
