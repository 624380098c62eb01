"""``demo.png``: the seconds of each contender, medians as bars and rounds as dots; the title is the message."""

from __future__ import annotations

from pathlib import Path

from sglang_pat.demo.contest import ADAPTIVE, HIGH, LOW, ContestResult
from sglang_pat.tools import pictures

COLORS = {f"static {LOW}": pictures.LAYOUT[0], f"static {HIGH}": pictures.LAYOUT[1], ADAPTIVE: pictures.OURS}


def draw(result: ContestResult, message: str, footer: str, path: Path) -> Path:
    figure, (axes,) = pictures.make_panels(1, width=7.6, height=4.4)
    for place, name in enumerate(result.contenders):
        rounds, median = result.list_seconds(name), result.compute_median(name)
        axes.bar(place, median, color=COLORS[name], width=0.62)
        if len(rounds) > 1:
            axes.plot([place] * len(rounds), rounds, "o", color=pictures.LINE, markersize=3)
        axes.text(place, max(rounds), f"{median:.1f} s", ha="center", va="bottom", fontweight="bold")
    axes.set_xticks(range(len(result.contenders)), result.contenders)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.1)
    dots = "; dots: rounds" if len(result.rounds) > 1 else ""
    pictures.set_labels(axes, "", f"seconds for the batch, median{dots}")
    pictures.set_figure_title(figure, message)
    pictures.set_footer(figure, footer)
    return pictures.save(figure, path)
