"""Jobs of the frameworks, run to their end, and what they left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from on_cpu import cpu_jobs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 900
"""Longest that a job may take: a loaded machine takes three times as long as a quiet one."""
LEFT_SECONDS = 60
"""Ray's daemons notice the driver's end by and by."""
SWITCHING = ("--settings", "{{base_tp:1,policy:threshold,switch_at:12}}")
"""Settings of a verl job with 16 responses; the engine merges when 12 are left: the first ends come early in a step."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Job:
    """An example's ``run_cpu.py``.

    Attributes:
        out: its folder.
        code: exit code.
        log: all that it printed.
    """

    example: str
    always: tuple[str, ...] = ()
    """Arguments of each job of this kind."""

    def __init__(self, model: Path, out: Path, args: tuple[str, ...]) -> None:
        self.out = out
        given = [text.format(out=out) for text in args]
        run = EXAMPLES / self.example / "run_cpu.py"
        command = [sys.executable, str(run), "--model", str(model), "--out", str(out), *self.always, *given]
        before = set(out.iterdir())
        self.code = self._run(command)
        if self.code and cpu_jobs.RAY_TOO_LATE in self.log:  # for which it has half a minute, on any machine
            for path in set(out.iterdir()) - before:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.code = self._run(command)

    def _run(self, command: list[str]) -> int:
        with (self.out / "printed.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
            try:
                return process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not over after {SECONDS} s; it printed\n{self.tail}") from None
            finally:
                _end(process)

    @property
    def log(self) -> str:
        return COLOUR.sub("", (self.out / "printed.txt").read_text(errors="replace"))

    @property
    def tail(self) -> str:
        return self.log[-4000:]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Metrics of each step, as the framework calls them."""
        path = self.out / "metrics.jsonl"
        return [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []

    def series(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]

    def tells_of_the_engine(self) -> bool:
        """Whether its log says what the engine is, and its log and its metrics the same of what it did in each step."""
        starts = re.findall(r"adaptive engine of 2 ranks: begins in tp1×dp2, may switch to tp2×dp1; policy", self.log)
        lines = re.findall(r"step: (\d+) requests in .* in tp2\), (\d+) switches, ([\d.]+) s paused by them", self.log)
        assert len(starts) == 1 and [int(requests) > 0 for requests, _, _ in lines] == [True] * len(self.steps), lines
        assert [int(switches) for _, switches, _ in lines] == self.series("rollout/switches")
        assert [float(pause) for _, _, pause in lines] == [round(s, 3) for s in self.series("rollout/pause_seconds")]
        return min(self.series("rollout/seconds/tp1") + self.series("rollout/seconds/tp2")) > 0

    def switches(self, log: str) -> int:
        """Decisions for another layout than the one in force."""
        decisions = [json.loads(line) for line in (self.out / log).read_text().splitlines()]
        return sum(line["decision"]["tp"] != line["snapshot"]["tp"] for line in decisions if "decision" in line)


class VerlJob(Job):
    example = "verl_grpo"
    # A model of random weights: with a lower rate, an update would hardly be seen.
    always = ("--lr", "1e-3", "--response", "192")


class OpenRlhfJob(Job):
    example = "openrlhf_grpo"
    # Of 16: many responses may end together, at the limit.
    always = ("--response", "192", "--switch-at", "12")


def nothing_left(variable: str, value: str) -> bool:
    """Whether no process with this variable in its environment is alive after a while."""
    end = time.monotonic() + LEFT_SECONDS
    while alive := [process for process in psutil.process_iter(["name", "cmdline"]) if _has(process, variable, value)]:
        if time.monotonic() > end:
            print([(process.pid, process.info) for process in alive])
            return False
        time.sleep(0.5)
    return True


def _has(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return process.environ().get(variable) == value
    except psutil.Error:
        return False


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
