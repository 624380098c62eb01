"""Habits of the code that a reader counts on.

Files are short or say why not, no class defines a method twice, and files are written whole or not at all.
"""

from __future__ import annotations

import ast
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("python", "profiler", "tests", "bench", "examples", "csrc")
MOST_LINES = 300
REASON = "One file because "
"""So begins, in the docstring of a module or the first comment of a C++ file, why it is not split."""
PAIRS = {"setter", "getter", "deleter", "overload"}


def sources(*suffixes: str) -> list[Path]:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(files)


def heading(path: Path) -> str:
    """A Python module's docstring; of a C++ file the comment that it begins with."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    return "\n".join(takewhile(lambda line: line.startswith("//"), text.splitlines()))


def test_a_long_file_says_why_it_is_not_split():
    long = {path: n for path in sources(".py", ".cpp", ".h") if (n := path.read_text().count("\n")) > MOST_LINES}
    silent = {str(path.relative_to(ROOT)): n for path, n in long.items() if REASON not in heading(path)}
    found = ", ".join(f"{name} ({n} lines)" for name, n in silent.items())
    assert not found, (
        f"more than {MOST_LINES} lines: {found}. Split by subject, or say in the docstring (C++: first comment) "
        f"'{REASON}…'"
    )
    needless = [str(path) for path in sources(".py", ".cpp", ".h") if REASON in heading(path) and path not in long]
    assert not needless, f"short enough, without a reason: {needless}"


def _paired(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in function.decorator_list]
    return not PAIRS.isdisjoint(names)


def test_methods_are_defined_once():
    """The second would silently replace the first."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    twice = []
    for path in sources(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.Module)):
                names = Counter(item.name for item in node.body if isinstance(item, kinds) and not _paired(item))
                where = f"{path.relative_to(ROOT)}: {getattr(node, 'name', path.stem)}"
                twice += [f"{where} defines {name} {count} times" for name, count in names.items() if count > 1]
    assert not twice, twice


def test_files_are_written_by_one_function():
    """``files.write``: whole or not at all.  ``testing/`` makes models, whole folders at once."""
    ways = {"write_text", "write_bytes", "rename", "replace"}
    found = []
    for path in sources(".py"):
        ours = path.relative_to(ROOT).parts
        if ours[0] not in ("python", "profiler") or "testing" in ours or path.name == "files.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            # Strings and dataclasses have a ``replace``, too.
            if isinstance(node, ast.Attribute) and node.attr in ways:
                if node.attr != "replace" or (isinstance(node.value, ast.Name) and node.value.id == "os"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, f"call sglang_pat.files.write instead: {', '.join(found)}"
