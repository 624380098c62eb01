"""The tables of SGLang's attributes, ``attributes.txt`` in the adapter's folder: what each attribute is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

from sglang_pat.launch.contract import find_folder

KINDS = ("fixed", "own", "layout", "group", "rank", "free")


@dataclass(frozen=True)
class AttributeLine:
    """A line of the table, for one attribute or several: ``pattern`` is a path, in which ``*`` stands for anything."""

    kind: str
    pattern: str
    reason: str


@cache
def read_table() -> tuple[AttributeLine, ...]:
    """All lines of the installed SGLang's ``attributes.txt``.  Raises ``ValueError`` for a line that is none."""
    return tuple(parse(resources.files("sglang_pat").joinpath("host", find_folder(), "attributes.txt").read_text()))


def parse(text: str) -> Iterable[AttributeLine]:
    """The lines of a table.  Raises ``ValueError`` that says what is wrong with it."""
    kind = root = reason = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            head, _, reason = line.partition(" -- ")
            kind, root = head.split()
            if kind not in KINDS or (kind in ("rank", "free") and not reason):
                raise ValueError(f"{line!r}: must be one of {', '.join(KINDS)}, a root, and for rank and free a reason")
            continue
        for name in line.split():
            if name.startswith("*"):
                raise ValueError(f"{root}.{name}: takes in everything; name the attribute")
            yield AttributeLine(kind, f"{root}.{name}", reason)


@cache
def find_line(path: str) -> AttributeLine | None:
    """The table's line for ``path``; None if it has none."""
    lines = [
        line for line in read_table() if line.pattern == path or ("*" in line.pattern and _matches(path, line.pattern))
    ]
    return max(lines, key=lambda line: (line.pattern == path, len(line.pattern)), default=None)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern.replace("[", "[[]"))  # brackets are part of paths


@cache
def list_agreed_paths() -> tuple[str, ...]:
    """Paths that change and must be the same on all ranks of a group after a switch."""
    return tuple(line.pattern for line in read_table() if line.kind == "group" and "*" not in line.pattern)
