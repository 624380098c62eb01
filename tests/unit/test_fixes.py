"""Each mend to SGLang names the report of its fault: an issue, a pull request, or our text of one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, DOCS = ROOT / "python/sglang_pat", ROOT / "docs"
MODULES = [path for path in sorted((PACKAGE / "host" / "fixes").glob("*.py")) if path.name != "__init__.py"]
REGISTER = (DOCS / "sglang.md").read_text()
TEXT = re.compile(r"\bupstream/(\w+\.md)")
REPORT = re.compile(r"https://github\.com/[\w-]+/[\w-]+/(?:issues|pull)/\d+|docs/upstream/\w+\.md")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_each_module_names_a_report(path):
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert REPORT.search(docstring.partition("Upstream: ")[2]), "the docstring says Upstream: and where"
    assert all((DOCS / "upstream" / name).exists() for name in TEXT.findall(text))
    assert f"`host/fixes/{path.name}`" in REGISTER


def test_each_row_of_a_mend_points_to_a_report():
    rows = [line for line in REGISTER.splitlines() if line.startswith("| ") and "`host/fixes/" in line]
    assert rows
    for row in rows:
        can_go_when = row.rstrip(" |").rpartition(" | ")[2]
        assert re.search(r"\]\((upstream/\w+\.md|https://github\.com/\S+/(issues|pull)/\d+)\)", can_go_when), row


def test_each_text_is_that_of_a_row():
    for path in (DOCS / "upstream").glob("*.md"):
        assert f"upstream/{path.name}" in REGISTER, path.name
