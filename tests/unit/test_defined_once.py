"""No class defines a method twice: the second would silently replace the first."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "sglang_pat"
PAIRS = {"setter", "getter", "deleter", "overload"}


def _paired(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in function.decorator_list]
    return not PAIRS.isdisjoint(names)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_methods_are_defined_once(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.Module)):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            names = Counter(item.name for item in node.body if isinstance(item, kinds) and not _paired(item))
            twice = [name for name, count in names.items() if count > 1]
            assert not twice, f"{getattr(node, 'name', path.stem)} defines {twice} twice"
