"""Triton's interpreter, which has to be chosen before Triton is imported; no test of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run_interpreted(module: str) -> str:
    """Run a module in a process with ``TRITON_INTERPRET=1``; returns the last line that it prints."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-m", module], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
