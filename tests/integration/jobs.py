"""A job of verl's, run to its end, and what it left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "examples" / "verl_grpo" / "run_cpu.py"
SECONDS = 900
"""Longest that a job may take: a loaded machine takes three times as long as a quiet one."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Job:
    """
    Attributes:
        out: its folder.
        code: exit code.
        log: all that it printed.
    """

    def __init__(self, model: Path, out: Path, args: tuple[str, ...]) -> None:
        self.out = out
        given = [text.format(out=out) for text in args]
        command = [sys.executable, str(RUN), "--model", str(model), "--out", str(out), *given]
        with (out / "log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
            try:
                self.code = process.wait(SECONDS)
            finally:
                _end(process)
        self.log = COLOUR.sub("", (out / "log.txt").read_text(errors="replace"))

    @property
    def tail(self) -> str:
        return self.log[-4000:]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """verl's metrics of each step."""
        path = self.out / "metrics.jsonl"
        return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []

    def series(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]

    def switches(self, replica: int = 0) -> int:
        """Decisions for another layout than the one in force."""
        lines = (self.out / f"decisions.{replica}.jsonl").read_text().splitlines()
        decisions = [json.loads(line) for line in lines]
        return sum(line["decision"]["tp"] != line["snapshot"]["tp"] for line in decisions if "decision" in line)


def _end(process: subprocess.Popen) -> None:
    """Kill what is left of it: Ray's daemons outlive a driver that was killed by a few seconds."""
    if process.poll() is not None:
        return
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
