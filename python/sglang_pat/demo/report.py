"""``demo.json``: every figure of the demonstration, and the machine it was made on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sglang_pat import files
from sglang_pat.demo.records import Result


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All there is to say.

    Attributes:
        machine: see ``sglang_pat.tools.machine``.
        seconds: duration of the whole demonstration, making the models included.
    """

    results: list[Result]
    machine: dict[str, Any]
    seconds: float

    def summary(self) -> str:
        """What was done on what, in one line."""
        rounds = " and ".join(str(len(result.rounds)) for result in self.results)
        rounds += " round" if rounds == "1" else " rounds"
        responses = sum(result.responses() for result in self.results)
        same = responses - sum(result.different() for result in self.results)
        return (
            f"{self.machine['cores']} CPU cores ({self.machine['cpu']}); {rounds}, the layouts in turns; "
            f"texts equal in all layouts: {same} of {responses}"
        )


def write(report: Report, path: Path) -> None:
    """Write ``report`` with the derived figures of each case beside the raw ones."""
    data = msgspec.to_builtins(report, str_keys=True)
    for result, entry in zip(report.results, data["results"], strict=True):
        entry["figures"] = {
            "median_seconds": {name: result.median(name) for name in result.contenders},
            "best_static": result.best_static,
            "gain_over_best_static": result.gain,
            "different_texts": result.different(),
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n", path)


def read(path: Path) -> Report:
    """What :func:`write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Report)
