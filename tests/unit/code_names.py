"""What the code defines, read without importing it: modules, classes, functions, attributes."""

from __future__ import annotations

import ast
import gc
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "sglang_pat"
FOLDERS = ("python", "profiler", "studies", "bench", "examples", "tests")


@cache
def parse(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text())
    gc.freeze()  # a collection does not go through it
    return tree


@cache
def walk(path: Path) -> list[ast.AST]:
    """All nodes of a file, in the order of ``ast.walk``."""
    return list(ast.walk(parse(path)))


def list_files(*folders: Path) -> list[Path]:
    """Python files below folders, by default all of the repository's, without copies that building a package leaves."""
    found = (path for folder in folders or [ROOT / name for name in FOLDERS] for path in sorted(folder.rglob("*.py")))
    return [path for path in found if "build" not in path.relative_to(ROOT).parts]


@cache
def list_bound(path: Path) -> frozenset[str]:
    """Names that a file binds, and its own: classes, functions, variables, attributes that are set."""
    found = {path.parent.name if path.name == "__init__.py" else path.stem}
    for node in walk(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(found)


@cache
def list_all_bound() -> frozenset[str]:
    """Names that the repository binds, and what the contract has of SGLang."""
    return list_names_of_sglang().union(*map(list_bound, list_files()))


@cache
def list_names_of_sglang() -> frozenset[str]:
    """What the contract has of SGLang, by qualified name, and each part of it."""
    text = "\n".join(path.read_text() for path in sorted((PACKAGE / "host").glob("*/contract.txt")))
    names = re.findall(r"^[\w.]+:([\w.]+)\(", text, re.MULTILINE)
    return frozenset(names) | {part for name in names for part in name.split(".")}


def resolves(target: str) -> bool:
    """Whether each part of a name in a Sphinx role is defined somewhere."""
    return all(part in list_all_bound() for part in target.lstrip("~.").split("."))
