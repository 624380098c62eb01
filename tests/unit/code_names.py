"""What the code defines, read without importing it: modules, classes with what they inherit, functions, attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "sglang_pat"
FOLDERS = ("python", "profiler", "studies", "bench", "examples", "tests")


@dataclass
class Scope:
    """A module or a class: its names, its classes by name, and what bases are called.

    Attributes:
        imports: name here → dotted name elsewhere.
        lines: first and last one.
    """

    name: str
    lines: tuple[int, int]
    names: set[str] = field(default_factory=set[str])
    classes: dict[str, Scope] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict[str, str])
    bases: list[str] = field(default_factory=list[str])


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


@cache
def read_modules() -> dict[str, Scope]:
    """The modules of this repository, by dotted name."""
    modules = {}
    for path in list_files():
        name, tree = make_module_name(path), parse(path)
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        modules[name] = _read_scope(name, tree, package)
    return modules


def _read_scope(name: str, node: ast.Module | ast.ClassDef, package: str) -> Scope:
    """Names that are bound in the body, in ``if``, ``try`` and ``with`` too; of a class also what methods set on
    ``self``."""
    end = 10**9 if isinstance(node, ast.Module) else node.end_lineno or node.lineno
    scope = Scope(name, (getattr(node, "lineno", 1), end))
    if isinstance(node, ast.ClassDef):
        scope.bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    todo: list[ast.AST] = list(node.body)
    while todo:
        part = todo.pop()
        if isinstance(part, ast.ClassDef):
            scope.names.add(part.name)
            scope.classes[part.name] = _read_scope(f"{name}.{part.name}", part, package)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            scope.names.add(part.name)
            if isinstance(node, ast.ClassDef):
                scope.names |= {
                    each.attr for each in ast.walk(part)
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                }  # fmt: skip
        elif isinstance(part, ast.Import | ast.ImportFrom):
            for alias in part.names:
                here = alias.asname or alias.name.partition(".")[0]
                scope.imports[here] = _find_imported(part, alias, package)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            scope.names.add(part.id)
        elif not isinstance(part, ast.Lambda):
            todo += ast.iter_child_nodes(part)
    return scope


def _find_imported(part: ast.Import | ast.ImportFrom, alias: ast.alias, package: str) -> str:
    if isinstance(part, ast.Import):
        return alias.name if alias.asname else alias.name.partition(".")[0]
    above = package.split(".")[: len(package.split(".")) - part.level + 1] if part.level else []
    return ".".join([*above, *([part.module] if part.module else []), alias.name])


@cache
def list_objects() -> frozenset[str]:
    """Dotted names of all that the repository defines; inherited members under their own class only."""
    found: set[str] = set()

    def add(scope: Scope) -> None:
        found.add(scope.name)
        found.update(f"{scope.name}.{each}" for each in scope.names)
        for each in scope.classes.values():
            add(each)

    for module in read_modules().values():
        add(module)
    return frozenset(found)


@cache
def list_names_of_sglang() -> frozenset[str]:
    """What the contract has of SGLang, by qualified name, and each part of it."""
    text = "\n".join(path.read_text() for path in sorted((PACKAGE / "host").glob("*/contract.txt")))
    names = re.findall(r"^[\w.]+:([\w.]+)\(", text, re.MULTILINE)
    return frozenset(names) | {part for name in names for part in name.split(".")}


def find_class(module: Scope, name: str) -> Scope | None:
    """A class by its name in a module, of the module itself or imported from another one of ours."""
    first, _, rest = name.partition(".")
    if first in module.classes:
        found = module.classes[first]
        return found if not rest else find_class(found, rest)
    target = module.imports.get(first)
    if target is None:
        return None
    home, _, last = (f"{target}.{rest}" if rest else target).rpartition(".")
    other = read_modules().get(home)
    return find_class(other, last) if other is not None else None


def has_member(module: Scope, owner: Scope, name: str) -> bool:
    """Whether a class has a member, its own or inherited; a base of SGLang's has what the contract says."""
    if name in owner.names:
        return True
    home = read_modules().get(owner.name.rpartition(".")[0], module)  # its bases are called as there
    for base in owner.bases:
        found = find_class(home, base)
        if found is not None and has_member(home, found, name):
            return True
        if found is None and f"{base.rpartition('.')[2]}.{name}" in list_names_of_sglang():
            return True
    return False


def resolves(module: Scope, line: int, target: str) -> bool:
    """Whether a Sphinx role at a line of a module names something: from the class around it outwards, or by its dotted
    name; a leading dot looks everywhere."""
    target = target.removeprefix("~")
    if target.startswith("."):
        return any(f".{name}".endswith(target) for name in list_objects())
    if target in list_objects():
        return True
    around, owner = list[Scope](), module
    while owner is not None:
        around.append(owner)
        owner = next((each for each in owner.classes.values() if each.lines[0] <= line <= each.lines[1]), None)
    first, _, rest = target.partition(".")
    for scope in reversed(around):
        if not rest and (has_member(module, scope, first) or first in scope.imports):
            return True
        owner = find_class(scope, target.rpartition(".")[0]) if rest else None
        if owner is not None and has_member(module, owner, target.rpartition(".")[2]):
            return True
    if rest and first in module.imports and f"{module.imports[first]}.{rest}" in list_objects():
        return True  # a name in a module that is imported here
    return bool(rest) and is_member(target)


def list_classes(scopes: Iterable[Scope] | None = None) -> Iterator[Scope]:
    for scope in read_modules().values() if scopes is None else scopes:
        yield from scope.classes.values()
        yield from list_classes(scope.classes.values())


def is_member(target: str) -> bool:
    """Whether some class, ours or SGLang's, has this name and this member: ``Class.member``."""
    owner, _, name = target.rpartition(".")
    owners = (each for each in list_classes() if each.name.endswith(f".{owner}"))
    return target in list_names_of_sglang() or any(has_member(each, each, name) for each in owners)
