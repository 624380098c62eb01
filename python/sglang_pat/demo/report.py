"""``demo.json``: every figure of the demonstration, and the machine it was made on."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from sglang_pat.comm.shm import LINK_ENV
from sglang_pat.demo.records import Run
from sglang_pat.tools.machine import machine as testing_machine
from sglang_pat.version import __version__


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to say.

    Attributes:
        model: its name.
        options: prompts, token limit, switch threshold.
        different: prompts whose answers are not the same in all runs, with the first character that differs.
        machine: see :func:`machine`.
        seconds: duration of the whole demonstration, making the model included.
    """

    model: str
    options: dict[str, Any]
    runs: list[Run]
    different: dict[int, int]
    machine: dict[str, Any]
    seconds: float

    def summary(self) -> str:
        """What was done on what, in one line."""
        prompts = len(self.runs[0].answers)
        line = f"{self.model}, {prompts} prompts, {self.machine['cores']} CPU cores"
        if link := self.machine.get("emulated_link"):
            line += f", emulated link (µs:GB/s) {link}"
        return f"{line}; texts equal in all runs: {prompts - len(self.different)} of {prompts}"


def write(report: Report, path: Path) -> None:
    """Write ``report`` with the derived figures of each run beside the raw ones."""
    data = msgspec.to_builtins(report, str_keys=True)
    for run, entry in zip(report.runs, data["runs"], strict=True):
        left = report.options["switch_at"]
        entry["figures"] = {
            "tokens": run.tokens,
            "wall_seconds": run.wall,
            "tokens_per_second": run.tokens_per_second,
            "tail_seconds": run.wall - run.tail_start(left),
            "tail_token_seconds": run.tail_token_time(left),
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def read(path: Path) -> Report:
    """What :func:`write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def machine() -> dict[str, Any]:
    """What the figures were taken on; a link that the ranks' backend emulates is named."""
    found = testing_machine() | {"sglang": version("sglang"), "sglang_pat": __version__}
    if link := os.environ.get(LINK_ENV):
        found["emulated_link"] = link
    return {name: str(value) if isinstance(value, str) else value for name, value in found.items()}
