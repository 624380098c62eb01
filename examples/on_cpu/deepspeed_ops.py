"""DeepSpeed's operators for a CPU, compiled once for an environment and not inside of a job.

DeepSpeed compiles them where a worker first needs them, which takes minutes.  A worker that is killed there leaves the
compiler's lock file behind, and each later job waits for that lock without an end.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock

BUILDERS = ("ShareMemCommBuilder", "FusedAdamBuilder")
"""Operators that a trainer on a CPU loads: its all-reduce, and Adam."""
_BUILD = f"""
from deepspeed.accelerator import get_accelerator
for name in {BUILDERS}:
    get_accelerator().create_op_builder(name).load()
"""


def copied(folder: Path) -> Path:
    """A value for TORCH_EXTENSIONS_DIR: the compiled operators in ``folder``, which belongs to one job.

    A job's own copy has no lock of another job in it.

    Raises:
        subprocess.CalledProcessError: the compiler failed.  Nothing is left behind.
    """
    return Path(shutil.copytree(_built(), folder / "torch_extensions"))


def _built() -> Path:
    """The environment's copy; compiled if it is not there, by one process at a time."""
    versions = "-".join(importlib.metadata.version(name) for name in ("torch", "deepspeed"))
    built = Path(sys.prefix) / "torch_extensions" / versions
    built.parent.mkdir(exist_ok=True)
    with filelock.FileLock(f"{built}.lock"):
        if not built.exists():
            print("compiling DeepSpeed's operators: once for this environment, some minutes", flush=True)
            with tempfile.TemporaryDirectory(dir=built.parent) as partial:
                target = Path(partial) / "built"
                target.mkdir()
                settings = {"TORCH_EXTENSIONS_DIR": str(target), "DS_ACCELERATOR": "cpu"}
                command = [sys.executable, "-c", _BUILD]
                subprocess.run(command, check=True, env=os.environ | settings, stdout=subprocess.DEVNULL)
                target.rename(built)
    return built
