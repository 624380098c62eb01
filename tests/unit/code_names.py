"""What the code defines, read without importing it: modules, classes, functions, attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "sglang_pat"
FOLDERS = ("python", "profiler", "studies", "bench", "examples", "tests")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def list_files(*folders: Path) -> list[Path]:
    """Python files below folders, by default all of the repository's, without copies that building a package leaves."""
    found = (path for folder in folders or [ROOT / name for name in FOLDERS] for path in sorted(folder.rglob("*.py")))
    return [path for path in found if "build" not in path.relative_to(ROOT).parts]


def make_module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "python" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _list_bound(name: str, node: ast.AST) -> Iterator[str]:
    """Dotted names that are bound below a module or a class: in its functions, the attributes that they set."""
    for part in ast.iter_child_nodes(node):
        bound = getattr(part, "name", None)
        if isinstance(part, ast.ClassDef):
            yield from (f"{name}.{bound}", *_list_bound(f"{name}.{bound}", part))
            continue
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}.{bound}"
        elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield f"{name}.{part.id if isinstance(part, ast.Name) else part.attr}"
        yield from _list_bound(name, part)


@cache
def list_objects() -> frozenset[str]:
    """Dotted names of all that the repository defines, and what the contract has of SGLang."""
    found = set(list_names_of_sglang())
    for path in list_files():
        found |= {name := make_module_name(path), *_list_bound(name, parse(path))}
    return frozenset(found)


@cache
def list_last_parts() -> frozenset[str]:
    return frozenset(name.rpartition(".")[2] for name in list_objects())


@cache
def list_names_of_sglang() -> frozenset[str]:
    """What the contract has of SGLang, by qualified name, and each part of it."""
    text = "\n".join(path.read_text() for path in sorted((PACKAGE / "host").glob("*/contract.txt")))
    names = re.findall(r"^[\w.]+:([\w.]+)\(", text, re.MULTILINE)
    return frozenset(names) | {part for name in names for part in name.split(".")}


def resolves(target: str) -> bool:
    """Whether each part of a name in a Sphinx role is defined somewhere."""
    return all(part in list_last_parts() for part in target.lstrip("~.").split("."))
