"""A job of an RL framework: its environment, model and prompts, and its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sglang_pat.cpu.shim import CHILD_SITE_DIR
from sglang_pat.testing import models
from sglang_pat.testing.prefork import ENVIRONMENT
from sglang_pat.tools.prompts import PROMPTS

EXAMPLES = str(Path(__file__).resolve().parents[1])
SMOLLM2 = Path(".cache") / "models" / "smollm2"

RAY_TOO_LATE = "timed out during startup"
"""Message of Ray when its node is not up after the 30 s that it gives it."""

WORDS = "license software free copy modify program source terms conditions work warranty".split()


def environment(**own: str) -> dict[str, str]:
    """Environment of a job: this process's, and ``own`` of the framework."""
    return (
        os.environ
        | ENVIRONMENT
        | {
            # SGLang without its CUDA kernels, and this folder, in each Python of the job.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CHILD_SITE_DIR), EXAMPLES, os.environ.get("PYTHONPATH")])),
            "GLOO_SOCKET_IFNAME": "lo",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            **own,
        }
    )


def model(folder: Path | None) -> Path:
    """The given Hugging Face folder, or SmolLM2-135M, which is made if it is not there yet."""
    return (folder or models.make_smollm2(SMOLLM2)).resolve()


def prompts(count: int, chat: bool) -> list[str]:
    """Short texts.  ``chat``: for a model that answers, which ends some of its answers early and others late."""
    if chat:
        return [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return [f"the {WORDS[i % 11]} {WORDS[(i * 3 + 1) % 11]} is {i}" for i in range(count)]


def run(command: list[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a job; its exit code, and the lines that it printed, which are printed here, too."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        sys.stdout.write(line)
        lines.append(line)
    code = process.wait()
    if code and any(RAY_TOO_LATE in line for line in lines):
        print(
            "error: this machine is too busy, Ray did not start within its 30 s: run it again when less runs beside it"
        )
    return code, lines


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Folder for ``ray.init(_temp_dir=…)``, with a short name: Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="pat_ray_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
