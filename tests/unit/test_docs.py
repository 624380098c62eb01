"""The pages: links lead somewhere, anchors exist, and prose is not wider than a page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 100
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Those of the repository; without git all in docs/."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.split() if not name.startswith(".")]  # templates of issues
    return [ROOT / name for name in names] or sorted((ROOT / "docs").rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and most others make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(place), f"{target}: no such heading; there are {sorted(anchors(place))}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_no_wider_than_a_page(page):
    text = FENCE.sub("", page.read_text())
    prose = [line for line in text.splitlines() if not line.startswith(("|", "![", "<", "    "))]
    assert not [line for line in prose if len(line) > COLUMNS]
