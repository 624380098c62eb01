"""Names in prose exist: what ``docs/architecture.md`` has in backticks, and what Sphinx roles in the code point to."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from . import code_names
from .code_names import PACKAGE, ROOT, list_bound, list_files, list_names_of_sglang, resolves, walk

pytestmark = [pytest.mark.unit, pytest.mark.xdist_group(code_names.__name__)]

ROLE = re.compile(r":(?:meth|class|func|data|attr|mod|exc|obj):`([^`]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PAGE = ROOT / "docs" / "architecture.md"


def test_roles_in_the_code_point_to_something():
    dangling = [
        f"{path.relative_to(ROOT)}:{number}: {role.group()}"
        for path in list_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for role in ROLE.finditer(line)
        if path != Path(__file__) and not resolves(role.group(1))
    ]
    assert not dangling


@cache
def list_constants() -> frozenset[str]:
    """Strings of the packages."""
    return frozenset(
        node.value
        for path in list_files() if path.is_relative_to(PACKAGE.parent)
        for node in walk(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )  # fmt: skip


@cache
def list_names_of_packages() -> frozenset[str]:
    """Names that the packages bind, and what the contract has of SGLang."""
    return list_names_of_sglang().union(*map(list_bound, list_files(ROOT / "python", ROOT / "profiler")))


def is_path(text: str) -> bool:
    return bool(re.fullmatch(r"[\w./]+(/|\.(py|md|toml|txt|cpp))", text))


def is_there(text: str) -> bool:
    """Whether code in backticks names something: a file, a flag, a route, a name, or a value of a setting."""
    if is_path(text):
        return (
            any(ROOT.glob(text))
            or any(PACKAGE.parent.rglob(text.strip("./")))
            or any((ROOT / folder / text).exists() for folder in ("python/sglang_pat/integrations", "examples"))
        )
    if text.startswith("--"):
        flags = "\n".join(list_constants()) + (ROOT / "docs/flags.md").read_text()
        return all(
            re.search(rf"{re.escape(flag.rstrip('*'))}", flags) for flag in text.split() if flag.startswith("--")
        )
    if re.fullmatch(r"(GET |POST )?/[\w/]+", text):
        return text.rpartition(" ")[2] in list_constants()
    name = text.removesuffix("()").replace("/", ".")
    if not re.fullmatch(r"[A-Za-z_][\w.]*…?", name):
        return True  # arithmetic, an assignment: no name
    if name.endswith("…"):
        return any(each.startswith(name[:-1]) for each in list_names_of_packages())
    if "." in name:
        return resolves(name)
    return name in list_names_of_packages() | list_constants() or name in (ROOT / "pyproject.toml").read_text()


def list_code(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def test_what_the_page_calls_code_is_there():
    assert not sorted({text for text in list_code(PAGE.read_text()) if not is_there(text)})


def list_items() -> list[tuple[list[str], str]]:
    """Items of the two ways through the code: a file, those that a number in brackets means, and what is said."""
    items = list[tuple[list[str], str]]()
    for way in re.findall(r"^### From [^\n]*$(.*?)(?=^#)", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        found = re.findall(r"^\d+\. `([\w/]+\.py)`(.*?)(?=^\d+\. |^\n|\Z)", way, re.MULTILINE | re.DOTALL)
        for file, said in found:
            numbers = map(int, re.findall(r"\((\d+)\)", said))
            items.append(([file, *(found[number - 1][0] for number in numbers)], said))
    return items


def list_names(path: Path) -> set[str]:
    """All names that a file defines or uses, in code."""
    names = set[str]()
    for node in walk(path):
        for attribute in ("id", "attr", "name", "arg", "asname"):
            name = getattr(node, attribute, None)
            names.update(name.split(".") if isinstance(name, str) else ())
    return names


def test_files_of_the_ways_have_the_names_that_are_said_of_them():
    """A newcomer looks for them there, and finds nothing by a name of yesterday."""
    items, missing = list_items(), list[str]()
    counts = re.findall(r"^### From [^\n]*: (\d+) files$", PAGE.read_text(), re.MULTILINE)
    assert len(items) == sum(map(int, counts)) > 20
    for files, said in items:
        names = set[str]().union(*(list_names(PACKAGE / file) for file in files))
        for text in list_code(said):
            last = text.rpartition(".")[2]
            if is_path(text) or not re.fullmatch(r"[A-Za-z_]\w*…?", last):
                continue
            start = last.removesuffix("…")
            if not any(each == start or last != start and each.startswith(start) for each in names):
                missing.append(f"{files} has no {text}")
    assert not missing
