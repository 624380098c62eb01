"""The picture of ``bench/switch.py``: how long a switch pauses decoding, ours and PAT's way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from sglang_pat.tools import pictures

WAYS = {"ours": pictures.OURS, "PAT's": pictures.OTHER}
NAMES = {"ours": "ours", "PAT's": "PAT's way"}
Rows = Sequence[dict]
"""Of one setting: ``tokens``, ``requests``, ``to`` ("tp2"), ``way``, ``own`` and ``pause`` (seconds without and with
the drain), as of ``_switch_figures.rows``.  A table may lack the latter, and give ``times`` with PAT's way: its ratio
to ours, which has more digits than the quotient of rounded milliseconds."""


def draw(settings: dict[str, Rows], about: str, path: Path) -> Path:
    """The measured pauses as dots, one row a point; one column a setting, merges above splits."""
    figure, axes = pictures.panels(2 * len(settings), width=6.2, height=3.7, columns=len(settings))
    for column, (name, rows) in enumerate(settings.items()):
        for line, (verb, to) in enumerate(directions(rows)):
            mine = [row for row in rows if row["to"] == to]
            _pauses(axes[line * len(settings) + column], mine)
            pictures.title(axes[line * len(settings) + column], f"{name}, {verb} to {to}: {panel_title(mine)}", 50)
    low = min(1e3 * row["own"] for rows in settings.values() for row in rows)
    high = max(1e3 * row.get("pause", row["own"]) for rows in settings.values() for row in rows)
    for one in axes:
        one.set_xlim(low / 2, high * 2.6)
    figure.legend(handles=_legend(), fontsize=8.5, frameon=False, loc="outside lower left", ncols=3)
    pictures.message(figure, title(settings))
    pictures.footer(figure, about, 0.4)
    return pictures.save(figure, path)


def title(settings: dict[str, Rows]) -> str:
    """How long ours takes with the drain and without, and how PAT's way compares."""
    everything = [row for rows in settings.values() for row in rows]
    ours = [row for row in everything if row["way"] == "ours"]
    whole, own = (pictures.span((1e3 * row.get(part, row["own"]) for row in ours), ".0f") for part in ("pause", "own"))
    ratios = [ratio for rows in settings.values() for ratio in times(rows)]
    return f"A switch stops decoding for {whole} ms; without the drain for {own} ms{_compared(ratios)}"


def panel_title(rows: Rows) -> str:
    """Of one setting and direction."""
    ratios = times(rows)
    if not ratios:
        return f"{pictures.span((1e3 * row['own'] for row in rows), '.0f')} ms"
    if min(ratios) >= 1:
        return f"PAT's way takes {pictures.span(ratios, '.1f')} times as long"
    return f"PAT's way is faster at {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} points"


def _compared(ratios: list[float]) -> str:
    if not ratios:
        return ""
    times_as_long = f"{pictures.span(ratios, '.1f')} times as long"
    if min(ratios) >= 1:
        return f", and PAT's way {times_as_long}"
    return f", and PAT's way {times_as_long} (it is faster at {sum(r < 1 for r in ratios)} of {len(ratios)} points)"


def times(rows: Rows) -> list[float]:
    """PAT's way over ours, without the drain, of each point and direction that has both."""
    ours = {(row["tokens"], row["requests"], row["to"]): row["own"] for row in rows if row["way"] == "ours"}
    theirs = {(row["tokens"], row["requests"], row["to"]): row for row in rows if row["way"] == "PAT's"}
    return [row.get("times", row["own"] / ours[key]) for key, row in theirs.items() if key in ours]


def directions(rows: Rows) -> Iterator[tuple[str, str]]:
    """(what it is called, layout it leads to), the merge first."""
    degrees = sorted({row["to"] for row in rows}, key=lambda to: int(to.removeprefix("tp")))
    yield "merge", degrees[-1]
    yield "split", degrees[0]


def _pauses(axes: Axes, rows: Rows) -> None:
    """One setting and direction: a dot for each way, its milliseconds beside it; hollow: with the drain."""
    points = sorted({(row["tokens"], row["requests"]) for row in rows})
    places = {point: place for place, point in enumerate(points)}
    for way, shade in WAYS.items():
        for row in (row for row in rows if row["way"] == way):
            place = places[row["tokens"], row["requests"]]
            own, whole = 1e3 * row["own"], 1e3 * row.get("pause", row["own"])
            axes.plot([own, whole], [place, place], color=shade, linewidth=1.0)
            axes.plot(whole, place, "o", color=shade, mfc="white", ms=5)
            axes.plot(own, place, "o", color=shade, ms=7)
            at, side, edge = (own, -8, "right") if way == "ours" else (whole, 8, "left")
            axes.annotate(
                f"{own:.0f} ms", (at, place), xytext=(side, 0), textcoords="offset points", ha=edge, va="center",
                fontsize=8.5, color=shade,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(points)), [f"{tokens:,} tokens, {_counted(n)}" for tokens, n in points])
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    pictures.labels(axes, "pause, ms", "")


def _counted(requests: int) -> str:
    return f"{requests} request{'s' * (requests > 1)}"


def _legend() -> list[Line2D]:
    style = dict(marker="o", linestyle="none")
    ways = [Line2D([], [], color=shade, markersize=7, label=NAMES[way], **style) for way, shade in WAYS.items()]
    label = "with the drain (until the steps in flight are done)"
    return [*ways, Line2D([], [], color=pictures.OURS, markerfacecolor="white", markersize=5, label=label, **style)]
