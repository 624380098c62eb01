"""What a stranger does first: ``--help`` of each command, and an import of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

COMMANDS = (
    "sglang_pat.launch_server", "sglang_pat.preflight", "sglang_pat.acceptance", "sglang_pat.demo",
    "sglang_pat.integrations.openrlhf", "profiler.sweep", "examples.grpo", "studies.compare",
)  # fmt: skip
"""Commands that README or the quickstart names."""


def run(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=os.environ | variables)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_is_ours_alone(command):
    done = run("-m", command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert 3 < len(done.stdout.splitlines()) < 100


def test_the_servers_help_has_our_flags_and_needs_nothing_of_sglang():
    code = "import sys; from sglang_pat.launch_server import main; main(['--help']); sys.exit('sglang' in sys.modules)"
    done = run("-c", code)
    assert done.returncode == 0 and "--pat-policy" in done.stdout and "--help-sglang" in done.stdout
    whole = run("-m", "sglang_pat.launch_server", "--help-sglang")
    assert whole.returncode == 0 and "--mem-fraction-static" in whole.stdout and "Warning" not in whole.stderr


@pytest.mark.long
def test_transformers_models_can_be_imported_in_the_environment_that_setup_makes():
    """torchvision's library for CUDA does not load on a CPU."""
    done = run("-W", "ignore", "-c", "from transformers import LlamaForCausalLM, AutoModelForCausalLM", PYTHONPATH="")
    assert done.returncode == 0, done.stderr
