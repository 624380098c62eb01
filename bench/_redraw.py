"""Draw pictures of ``docs/img`` from ``docs/results/*.csv`` and README's table, so that all show the same run.

    python bench/_redraw.py [layouts] [switch] [tail_batching] [rl_step] [verl_step] [learning] [lending]

Put new figures into the file first.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from sglang_pat.tools import pictures

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # studies/ is not installed
IMAGES, RESULTS = ROOT / "docs" / "img", ROOT / "docs" / "results"


def tables(page: Path, *columns: str) -> Iterator[list[dict[str, str]]]:
    """The tables of a page that have all these columns: their rows, by column."""
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        heads, _, *rows = ([cell.strip(" *") for cell in line[1:-1].split("|")] for line in block.strip().splitlines())
        if set(columns) <= set(heads):
            yield [dict(zip(heads, row, strict=True)) for row in rows]


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of ``docs/results/NAME.csv``, by column."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float:
    return float(text.replace(",", ""))


# -- README's six cases ---------------------------------------------------------------------------------------

WAYS = {
    "static tp1×dp2": ("always tp1×dp2", "D", pictures.BLUE),
    "static tp2×dp1": ("always tp2×dp1", "D", pictures.ORANGE),
    "adaptive": ("adaptive", "o", pictures.OURS),
}
"""Columns of README's table: name, mark and colour in the picture."""
SPEED = "speed over the better static one"


def percents() -> dict[str, list[float]]:
    """Percent of time beyond the better static layout's, by case and way; negative where it is faster."""
    (rows,) = tables(ROOT / "README.md", "model, link", SPEED, *WAYS)
    cases = {row["model, link"].replace("`", ""): [number(row[way]) for way in WAYS] for row in rows if row[SPEED]}
    return {case: [100 * (each / min(seconds[:2]) - 1) for each in seconds] for case, seconds in cases.items()}


def message(found: dict[str, list[float]]) -> str:
    """What the picture says, in one sentence."""
    static, adaptive = (max(max(each[part]) for each in found.values()) for part in (slice(2), slice(2, 3)))
    ours = f"adaptive is at most {adaptive:.1f}% slower" if adaptive > 0 else "adaptive never is"
    return f"A fixed layout is up to {static:.0f}% slower if you choose the wrong one; {ours}"


def layouts() -> Path:
    """What each layout takes in the cases of ``bench/rollout.py``, against the better static one."""
    slower = percents()
    figure, (axes,) = pictures.make_panels(1, width=9.9, height=4.0)
    places = range(len(slower), 0, -1)
    for place, each in zip(places, slower.values(), strict=True):
        axes.plot([min(each), max(each)], [place, place], color=pictures.LIGHT, linewidth=2, zorder=1)
    for way, (name, marker, color) in enumerate(WAYS.values()):
        values = [each[way] for each in slower.values()]
        axes.scatter(values, places, marker=marker, color=color, s=90, label=name, zorder=2 + way)
    axes.axvline(0, color=pictures.LINE, linewidth=1, zorder=0)
    axes.set_yticks(list(places), [case.replace("emulated ", "") + "*" * ("emulated" in case) for case in slower])
    pictures.set_labels(axes, "time of a batch against the better fixed layout, % (left is faster)", "")
    axes.legend(frameon=False, loc="lower right", fontsize=9.5)
    pictures.set_figure_title(figure, message(slower))
    pictures.set_footer(figure, "* emulated link; two CPU cores, one rank each; medians; rounds vary by 20%")
    return pictures.save(figure, IMAGES / "layouts.png")


# -- a switch -------------------------------------------------------------------------------------------------

SHADES = {"ours": pictures.OURS, "PAT's way": pictures.OTHER}
Rows = Sequence[dict]
"""Rows of one setting: ``tokens``, ``requests``, ``to`` ("tp2"), ``way``, ``own`` and ``pause`` (milliseconds without
and with the drain; PAT's way is known without), and ``times``: PAT's way over ours."""


def switch() -> Path:
    """How long a switch pauses decoding: one row a point; one column a setting, merges above splits."""
    settings = {}
    for ranks in (4, 2):
        settings[f"{ranks} ranks"] = [row for line in read_rows(f"switch_{ranks}_ranks") for row in _switch_rows(line)]
    figure, axes = pictures.make_panels(2 * len(settings), width=6.2, height=3.7, columns=len(settings))
    for column, (name, rows) in enumerate(settings.items()):
        degrees = sorted({_degree(row) for row in rows})
        for line, (verb, tp) in enumerate((("merge", degrees[-1]), ("split", degrees[0]))):
            of_degree = [row for row in rows if _degree(row) == tp]
            _pauses(axes[line * len(settings) + column], of_degree)
            title = f"{name}, {verb} to tp{tp}: PAT's way takes {_times(of_degree)} times as long"
            pictures.set_panel_title(axes[line * len(settings) + column], title, 50)
    everything = [row for rows in settings.values() for row in rows]
    for one in axes:
        one.set_xlim(min(row["own"] for row in everything) / 2, max(row["pause"] for row in everything) * 2.6)
    style = dict(marker="o", linestyle="none")
    handles = [Line2D([], [], color=shade, markersize=7, label=way, **style) for way, shade in SHADES.items()]
    label = "with the drain (until the steps in flight are done)"
    handles.append(Line2D([], [], color=pictures.OURS, markerfacecolor="white", markersize=5, label=label, **style))
    figure.legend(handles=handles, fontsize=8.5, frameon=False, loc="outside lower left", ncols=3)
    ours = [row for row in everything if row["way"] == "ours"]
    whole, own = (pictures.format_span((row[part] for row in ours), ".0f") for part in ("pause", "own"))
    pictures.set_figure_title(
        figure,
        f"A switch stops decoding for {whole} ms; without the drain for {own} ms, and PAT's way "
        f"{_times(everything)} times as long",
    )
    source = "AMD EPYC, 2 cores. Medians, drawn from docs/results/switch_*.csv; dates: switch.md."
    pictures.set_footer(figure, source, 0.4)
    return pictures.save(figure, IMAGES / "switch.png")


def _switch_rows(line: dict[str, str]) -> Iterator[dict]:
    """Ours, and PAT's way if it was measured."""
    tokens, requests = (int(number(part)) for part in line["tokens alive, requests"].split(", "))
    point = {"tokens": tokens, "requests": requests, "to": line["to"]}
    own, whole = (number(text.strip("()")) for text in line["ours"].split())
    yield point | {"way": "ours", "own": own, "pause": whole}
    if line["PAT's way"] != "–":
        theirs = number(line["PAT's way"])
        yield point | {"way": "PAT's way", "own": theirs, "pause": theirs, "times": number(line["times"])}


def _degree(row: dict) -> int:
    return int(row["to"].removeprefix("tp"))


def _times(rows: Rows) -> str:
    return pictures.format_span((row["times"] for row in rows if "times" in row), ".1f")


def _pauses(axes: Axes, rows: Rows) -> None:
    """One setting and direction: a dot for each way, its milliseconds beside it; hollow: with the drain."""
    points = sorted({(row["tokens"], row["requests"]) for row in rows})
    for row in rows:
        shade, place = SHADES[row["way"]], points.index((row["tokens"], row["requests"]))
        own, whole = row["own"], row["pause"]
        axes.plot([own, whole], [place, place], color=shade, linewidth=1.0)
        axes.plot(whole, place, "o", color=shade, mfc="white", ms=5)
        axes.plot(own, place, "o", color=shade, ms=7)
        at, side, edge = (own, -8, "right") if row["way"] == "ours" else (whole, 8, "left")
        axes.annotate(
            f"{own:.0f} ms", (at, place), xytext=(side, 0), textcoords="offset points", ha=edge, va="center",
            fontsize=8.5, color=shade,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(points)), [f"{tokens:,} tokens, {n} request{'s' * (n > 1)}" for tokens, n in points])
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    pictures.set_labels(axes, "pause, ms", "")


# -- tail batching --------------------------------------------------------------------------------------------


def tail_batching() -> Path:
    """Draw rounds with tail batching, with adaptive TP, and with both."""
    from studies.tail_picture import draw

    seconds = {(row["setting"], float(row["ρ"])): _round_seconds(row) for row in read_rows("tail_batching")}
    source = "Drawn from docs/results/tail_batching.csv."
    return draw(seconds, source, IMAGES / "tail_batching.png")


def _round_seconds(row: dict[str, str]) -> dict[str, float]:
    """Seconds by way.  The last one is the base over the gain: the same to a second, and with more digits."""
    from studies.tail_picture import ADAPTIVE, BASE, BOTH, TAIL

    columns = {BASE: "base, s", ADAPTIVE: "with adaptive TP", TAIL: "tail batching"}
    seconds = {way: number(row[column]) for way, column in columns.items()}
    return seconds | {BOTH: seconds[BASE] / number(row["gain of both"])}


# -- a training step ------------------------------------------------------------------------------------------


def rl_step() -> Path:
    """Draw the stages of a simulated step."""
    from studies.step_picture import draw, read_lines

    return draw(read_lines(read_rows("rl_step")), "Drawn from docs/results/rl_step.csv.", IMAGES / "rl_step.png")


def verl_step() -> Path:
    """Draw the stages of a step of real jobs."""
    sys.path.insert(0, str(Path(__file__).parent))
    from rl_step import draw

    return draw(read_rows("verl_step"), IMAGES / "verl_step.png")


# -- learning -------------------------------------------------------------------------------------------------

Shares = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Shares of the problems held out that are right before and after, by way, one a seed."""


def learning() -> Path:
    """Draw what each way has learnt, seed by seed."""
    shares = {
        row["way"].strip("`"): tuple(list(map(number, row[part].split(", "))) for part in ("held out before", "after"))
        for row in read_rows("learning")
    }
    return draw_learning(shares, IMAGES / "learning.png")  # pyright: ignore[reportArgumentType]


def draw_learning(shares: Shares, path: Path) -> Path:
    """A line a way, a dot a seed; shaded: between the seeds of ``plain``."""
    figure, (axes,) = pictures.make_panels(1, width=8.0, height=3.9)
    if "plain" in shares:
        after = shares["plain"][1]
        axes.axvspan(min(after), max(after), color=pictures.GRID, zorder=0, label="after, seeds of plain")
    for place, (before, after) in enumerate(shares.values()):
        only_once = {} if place else {"label": "before"}, {} if place else {"label": "after, one seed"}
        axes.plot(before, [place] * len(before), "o", color=pictures.FAINT, markersize=7, **only_once[0])
        axes.plot(after, [place] * len(after), "o", color=pictures.OURS, markersize=9, alpha=0.8, **only_once[1])
    axes.set_yticks(range(len(shares)), list(shares), fontsize=11)
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(left=0)
    pictures.set_labels(axes, "share of right answers to problems that are never trained", "")
    figure.legend(fontsize=10, frameon=False, loc="outside lower left", ncols=3)
    pictures.set_figure_title(figure, format_learning(shares))
    return pictures.save(figure, path)


def format_learning(shares: Shares) -> str:
    before = pictures.format_span(share for part, _ in shares.values() for share in part)
    after = pictures.format_span(sum(part) / len(part) for _, part in shares.values())
    return f"After the same problems {after} of those held out are right, whichever way was used; {before} before"


# -- ranks that are lent --------------------------------------------------------------------------------------


def lending() -> Path:
    """Draw what a step took in each way."""
    rows = read_rows("lending")
    figure, (axes,) = pictures.make_panels(1, width=8.0, height=2.7)
    for place, row in enumerate(rows):
        fastest, slowest = map(number, row["fastest and slowest"].split(" to "))
        axes.plot([fastest, slowest], [place, place], color=pictures.STEEL, linewidth=5, solid_capstyle="butt")
        axes.plot(number(row["step, s"]), place, "o", color=pictures.OURS, markersize=11)
        label = f"{row['step, s']} s"
        axes.annotate(label, (number(row["step, s"]), place), xytext=(0, 9), textcoords="offset points", ha="center",
                      fontsize=10.5, color=pictures.LINE)  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["way"] for row in rows], fontsize=11)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    pictures.set_labels(axes, "seconds of a step: median of 12, from the fastest to the slowest", "")
    pictures.set_figure_title(figure, format_lending(rows))
    pictures.set_footer(figure, "GRPO on two CPU cores, small steps; drawn from docs/results/lending.csv")
    return pictures.save(figure, IMAGES / "lending.png")


def format_lending(rows: Sequence[Mapping[str, str]]) -> str:
    """What lending gains, beside what steps of one way differ by."""
    seconds = [number(row["step, s"]) for row in rows]
    fastest, slowest = map(number, rows[0]["fastest and slowest"].split(" to "))
    gain, noise = seconds[0] - min(seconds), slowest - fastest
    what = "less than" if gain < noise else "more than"
    return (
        f"On two cores a lent rank saves {gain:.2f} s of a step of {seconds[0]:.2f} s: {what} the {noise:.2f} s "
        "by which steps without lending differ"
    ).replace(" s ", "\N{NO-BREAK SPACE}s ")


DRAWN = {
    "layouts": layouts, "switch": switch, "tail_batching": tail_batching, "rl_step": rl_step, "verl_step": verl_step,
    "learning": learning, "lending": lending,
}  # fmt: skip


def main(names: list[str]) -> int:
    for name in names or DRAWN:
        print(DRAWN[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
