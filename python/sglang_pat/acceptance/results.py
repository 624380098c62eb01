"""What a step of the acceptance found, and the report: ``acceptance.json`` and ``acceptance.md``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from sglang_pat import files

Verdict = Literal["passed", "failed", "measured", "left out"]


class Result(msgspec.Struct, kw_only=True):
    """Result of one step.

    Attributes:
        name: name of the step; set by the command.
        verdict: ``passed`` and ``failed`` by a bar; ``measured`` where there is none; ``left out`` where something
            that the step needs is not there.
        line: the finding in one line.
        rows: a table, as lists; the first one is its head.
        figures: all measurements.
        traceback: traceback of a step that failed by an exception.
        seconds: duration of the step.
    """

    name: str = ""
    verdict: Verdict
    line: str
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    traceback: str = ""
    seconds: float = 0.0


class Report(msgspec.Struct, kw_only=True):
    """All steps, and the machine they ran on."""

    machine: dict[str, Any]
    options: dict[str, Any]
    results: list[Result] = []
    seconds: float = 0.0

    @property
    def failed(self) -> list[Result]:
        return self.select_by_verdict("failed")

    def select_by_verdict(self, verdict: Verdict) -> list[Result]:
        return [result for result in self.results if result.verdict == verdict]

    @property
    def counted(self) -> str:
        """Number of steps by verdict, as in "9 passed, 1 left out"."""
        counts = Counter(result.verdict for result in self.results)
        return ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])

    def save(self, folder: Path) -> None:
        """Write both files; called after each step, so that an ended run leaves what it has."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        for name, content in (("acceptance.json", data), ("acceptance.md", self.format_page().encode())):
            files.write(content + b"\n", folder / name)

    def format_page(self) -> str:
        conditions = ", ".join(f"{name} {value}" for name, value in (self.machine | self.options).items())
        overview = [[result.name, result.verdict, result.line, f"{result.seconds:.0f}"] for result in self.results]
        overview.insert(0, ["step", "verdict", "finding", "seconds"])
        lines = ["# Acceptance of sglang_pat", "", conditions, "", *_format_table(overview)]
        for result in self.results:
            if result.rows or result.traceback:
                lines += ["", f"## {result.name}", "", result.line]
            if result.rows:
                lines += ["", *_format_table(result.rows)]
            if result.traceback:
                lines += ["", "```", result.traceback.rstrip(), "```"]
        return "\n".join(lines)


def _format_table(rows: list[list[str]]) -> list[str]:
    """A cell is one line, whatever a model says."""
    head, *body = [f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in row)} |" for row in rows]
    return [head, f"|{' --- |' * len(rows[0])}", *body]
