"""What the benches share: their options, the line about the machine, and the file with the figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sglang_pat.tools.machine import describe_machine


def options(doc: str, quick: str) -> argparse.ArgumentParser:
    """Args: ``doc``: of the bench; ``quick``: what ``--quick`` does."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


def about(**more: Any) -> dict[str, Any]:
    """What the figures are taken on, ``more`` of it if given; also printed."""
    machine = describe_machine() | more
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    return machine


def write(file: Path | None, **found: Any) -> None:
    """The figures, if somebody wants them in a file."""
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")
