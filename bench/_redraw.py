"""Draw pictures of ``docs/img`` from the tables of ``docs/results``, so that page and picture show the same run.

    python bench/_redraw.py [switch] [rollout] [tail_batching]

A bench draws the same with ``--png``, and with more dots: it knows each round, where a table has medians only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # studies/ is not installed
PAGES, IMAGES = ROOT / "docs" / "results", ROOT / "docs" / "img"
MACHINE = "AMD EPYC, 2 cores"


def tables(page: str) -> Iterator[list[dict[str, str]]]:
    """All tables of a page: their rows, by column."""
    for block in re.findall(r"(?:^\|.*\n)+", (PAGES / page).read_text(), re.MULTILINE):
        heads, _, *rows = ([cell.strip(" *") for cell in line[1:-1].split("|")] for line in block.strip().splitlines())
        yield [dict(zip(heads, row, strict=True)) for row in rows]


def with_columns(page: str, *columns: str) -> list[list[dict[str, str]]]:
    """Those tables of a page that have all these columns."""
    return [rows for rows in tables(page) if set(columns) <= set(rows[0])]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def pair(text: str) -> tuple[str, ...]:
    """Cells that have two things: "1,024, 8"."""
    return tuple(part.strip() for part in text.split(", "))


def switch() -> Path:
    """The two tables of ``switch.md``: medians, ours without the drain (with it)."""
    from _switch_picture import draw

    settings = {}
    for rows in with_columns("switch.md", "tokens alive, requests", "KV", "PAT's way"):
        found = [row for line in rows for row in _switch_rows(line)]
        highest = max(int(row["to"].removeprefix("tp")) for row in found)
        settings[f"{highest} ranks"] = found
    return draw(settings, about("switch.md"), IMAGES / "switch.png")


def _switch_rows(line: dict[str, str]) -> Iterator[dict]:
    """Ours, and PAT's way if it was measured."""
    tokens, requests = (int(number(part)) for part in pair(line["tokens alive, requests"]))
    point = {"tokens": tokens, "requests": requests, "to": line["to"]}
    own, whole = (number(text.strip("()")) / 1e3 for text in line["ours"].split())
    yield point | {"way": "ours", "own": own, "pause": whole}
    if line["PAT's way"] != "–":
        yield point | {"way": "PAT's", "own": number(line["PAT's way"]) / 1e3, "times": number(line["times"])}


def rollout() -> Path:
    """The table of ``rollout.md``: medians, and the ratio of each round."""
    from _rollout_picture import draw

    (rows,) = with_columns("rollout.md", "model, link, lengths", "rounds")
    return draw([_case(row) for row in rows], about("rollout.md"), IMAGES / "rollout.png")


def _case(row: dict[str, str]):
    from _rollout_picture import Case

    model, link, _ = pair(row["model, link, lengths"])
    layouts = {name: number(cell) for name, cell in row.items() if name.startswith("static ")}
    case = Case(
        model=model, link="none" if link == "natural" else link, requests=int(number(pair(row["requests, tokens"])[0])),
        static={name.removeprefix("static ").removesuffix(", s"): seconds for name, seconds in layouts.items()},
        seconds=number(row["`survival`, s"]), rounds=[number(cell) for cell in pair(row["rounds"])],
    )  # fmt: skip
    return case


def tail_batching() -> Path:
    """The table of ``tail_batching.md`` that has both together."""
    from studies.tail_picture import draw

    (rows,) = with_columns("tail_batching.md", "setting", "with both", "gain of both")
    found = {(row["setting"], float(row["ρ"])): _round_seconds(row) for row in rows}
    source = "Drawn from a table of docs/results/tail_batching.md."
    return draw(found, source, IMAGES / "tail_batching.png")


def _round_seconds(row: dict[str, str]) -> dict[str, float]:
    """Seconds by way.  The last one is the base over the gain: the same to a second, and with more digits."""
    from studies.tail_picture import ADAPTIVE, BASE, BOTH, TAIL

    seconds = {way: number(row[column]) for way, column in
               ((BASE, "base, s"), (ADAPTIVE, "with adaptive TP"), (TAIL, "tail batching"))}  # fmt: skip
    return seconds | {BOTH: seconds[BASE] / number(row["gain of both"])}


def about(page: str) -> str:
    return f"{MACHINE}. Medians, drawn from the tables of docs/results/{page}, which has dates and commits."


DRAWN = {"switch": switch, "rollout": rollout, "tail_batching": tail_batching}


def main(names: list[str]) -> int:
    for name in names or DRAWN:
        print(DRAWN[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
