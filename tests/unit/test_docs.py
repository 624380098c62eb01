"""The pages: links lead somewhere, in the repository and on the site, and prose is not wider than a page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COLUMNS = 100
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """The pages of the repository; without git all in docs/."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split()] or sorted(DOCS.rglob("*.md"))


def anchors(page: Path) -> set[str]:
    return list_anchors(FENCE.sub("", page.read_text()))


def list_anchors(text: str) -> set[str]:
    """Anchors of the headings in a text, as GitHub and most others make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
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


def test_the_site_has_all_pages_and_begins_with_index():
    nav = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2])
    assert nav[0] == "index.md"
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_links_of_the_site_stay_in_it(page):
    links = [target.partition("#")[0] for target in LINK.findall(FENCE.sub("", page.read_text()))]
    places = [(page.parent / target).resolve() for target in links if not target.startswith(("http://", "https://"))]
    outside = [str(place.relative_to(ROOT)) for place in places if not place.is_relative_to(DOCS)]
    assert not outside, f"the site has no {outside}: name the file, as code"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_no_wider_than_a_page(page):
    text = FENCE.sub("", page.read_text())
    prose = [line for line in text.splitlines() if not line.startswith(("|", "![", "<", "    "))]
    assert not [line for line in prose if len(line) > COLUMNS]


def test_readmes_picture_says_what_its_table_says():
    from bench import _redraw

    text = (ROOT / "README.md").read_text()
    said = _redraw.message(_redraw.percents())
    assert f"![{said}](docs/img/layouts.png)" in text
    assert f"![{said}](img/layouts.png)" in (DOCS / "index.md").read_text()


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\d]|\.\d)")


def list_numbers(text: str) -> set[str]:
    """Figures of a text, without the commas; those in names (``tp4``, ``R0``) are none."""
    return {number.replace(",", "").rstrip(".") for number in NUMBER.findall(text)}


def list_index_rows() -> list[tuple[str, str, str]]:
    """Rows of the index of results: question, answer, link to a page or to a section of one."""
    text = (DOCS / "results/README.md").read_text()
    return re.findall(r"^\| (.*?) \| (.*) \| \[[^\]]*\]\(([^)]+)\) \|$", text, re.MULTILINE)


def read_section(page: Path, anchor: str) -> str:
    """A page, or the part of it from a heading to the next one that is not below it."""
    text = page.read_text()
    for heading in re.finditer(r"^(#+) .+$", text, re.MULTILINE):
        if anchor and anchor in list_anchors(heading.group()):
            end = re.search(rf"^#{{1,{len(heading.group(1))}}} ", text[heading.end() :], re.MULTILINE)
            return text[heading.start() : heading.end() + end.start() if end else None]
    return text


@pytest.mark.parametrize(("question", "answer", "link"), list_index_rows(), ids=lambda value: value[:60])
def test_figures_of_the_index_stand_on_their_page(question, answer, link):
    """Figures stand as they are written there, so that a page that is measured anew takes the index along."""
    page, _, anchor = link.partition("#")
    missing = list_numbers(question + answer) - list_numbers(read_section(DOCS / "results" / page, anchor))
    assert not missing, f"{link} has no {sorted(missing)}"


def test_the_index_has_all_its_rows_and_all_pages():
    text = (DOCS / "results/README.md").read_text()
    rows = list_index_rows()
    assert len(rows) == len(re.findall(r"^\|", text, re.MULTILINE)) - 2 > 30
    pages = {(DOCS / "results" / link.partition("#")[0]).resolve() for *_, link in rows}
    assert pages >= {page for page in (DOCS / "results").glob("*.md") if page.name != "README.md"}
