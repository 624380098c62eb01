"""``demo.png``: for each case the seconds of each contender, and beside them how a batch drained."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sglang_pat.demo import timeline, verdict
from sglang_pat.demo.contest import HIGH, LOW
from sglang_pat.demo.records import Result, Run, SeenSwitch
from sglang_pat.demo.report import Report
from sglang_pat.tools import pictures
from sglang_pat.tools.pictures import FAINT, LINE, plt

COLORS = {str(LOW): pictures.LAYOUT[0], str(HIGH): pictures.LAYOUT[1]}
ADAPTIVE, PAUSE, IDLE = pictures.OURS, pictures.RED, pictures.LIGHT
WIDTH, CASE_HEIGHT, HEAD, FOOT = 12.0, 4.6, 1.05, 0.45
"""Inches."""
TITLE_COLUMNS = 105


def draw(report: Report) -> Figure:
    """One block a case."""
    height = HEAD + FOOT + CASE_HEIGHT * len(report.results)
    figure = plt.figure(figsize=(WIDTH, height), facecolor="white")
    message = textwrap.fill(verdict.headline(report.results), TITLE_COLUMNS)
    figure.text(0.012, 1 - 0.15 / height, message, fontsize=12.5, fontweight="bold", va="top")
    figure.text(0.012, 1 - 0.72 / height, verdict.choice(report.results), fontsize=10.5, color=LINE, va="top")
    for number, result in enumerate(report.results):
        top = 1 - (HEAD + number * CASE_HEIGHT) / height
        _case(figure, result, top, CASE_HEIGHT / height)
    figure.legend(handles=_legend(), loc="lower left", ncol=5, fontsize=8.5, frameon=False, bbox_to_anchor=(0.005, 0.0))
    figure.text(0.99, 0.12 / height, report.summary(), fontsize=8, color=FAINT, ha="right")
    return figure


def _case(figure: Figure, result: Result, top: float, height: float) -> None:
    """Left: bars of the medians.  Right: the contenders of one round, one below the other."""
    work = result.work
    about = f"{result.model}, {result.link_name}: {work['batch']} requests, the longest of {work['limit']} tokens"
    figure.text(0.012, top - 0.05 * height, about, fontsize=10.5, fontweight="bold", va="center")
    bars = figure.add_axes((0.05, top - 0.86 * height, 0.22, 0.74 * height))
    _bars(bars, result)
    until = 1.1 * max(run.seconds for run in result.typical)
    count = len(result.typical)
    for row, run in enumerate(result.typical):
        strip = 0.74 / count
        bottom = top - (0.12 + (row + 1) * strip) * height
        axes = figure.add_axes((0.33, bottom, 0.655, (strip - 0.06) * height))
        _drain(axes, run, until)
        axes.tick_params(labelbottom=row == count - 1)
        if row == count - 1:
            axes.set_xlabel("seconds since the batch was sent", fontsize=9, loc="left")


def _bars(axes: Axes, result: Result) -> None:
    pictures.tidy(axes)
    for x, name in enumerate(result.contenders):
        seconds, median = result.seconds(name), result.median(name)
        color = COLORS.get(name.removeprefix("static "), ADAPTIVE)
        axes.bar(x, median, color=color, width=0.62)
        axes.plot([x] * len(seconds), seconds, "o", color=LINE, markersize=3)
        axes.text(x, max(seconds) * 1.03, f"{median:.1f} s", ha="center", fontsize=9, fontweight="bold")
    axes.set_xticks(range(len(result.contenders)), [n.replace(" ", "\n") for n in result.contenders], fontsize=9)
    axes.set_ylim(0, 1.15 * max(max(result.seconds(name)) for name in result.contenders))
    axes.set_ylabel("seconds for the batch (bar: median, dots: rounds)", fontsize=8.5)
    axes.grid(visible=False, axis="x")


def _drain(axes: Axes, run: Run, until: float) -> None:
    """Requests left over time, in the colour of the layout; above, the ranks: hatched while they are idle."""
    count = len(run.answers)
    for band in timeline.bands(run):
        times, counts = timeline.left(run, band.start, band.end)
        axes.fill_between(times, counts, step="post", color=COLORS[band.layout], alpha=0.85, linewidth=0)
    for lane in timeline.lanes(run):
        low, high = min(lane.ranks), max(lane.ranks) + 1
        style: dict[str, Any] = dict(color=COLORS[lane.layout], linewidth=0)
        if not lane.busy:
            style = dict(facecolor="white", edgecolor=IDLE, hatch="//////", linewidth=0.5)
        bottom, tall = count * (1.12 + 0.2 * low), count * (0.2 * (high - low) - 0.04)
        axes.broken_barh([(lane.start, lane.end - lane.start)], (bottom, tall), **style)
    for switch in run.switches:
        if switch.requests or switch.error:
            _switch(axes, switch, count)
    axes.text(run.seconds, 0, f" {run.seconds:.1f} s", fontsize=9.5, fontweight="bold", va="bottom", color=LINE)
    axes.set_title(run.contender, loc="left", fontsize=9.5, pad=2)
    axes.set_xlim(0, until)
    axes.set_ylim(0, 1.55 * count)
    axes.set_yticks(
        [0, count // 2, count, 1.2 * count, 1.4 * count], ["0", str(count // 2), str(count), "rank 0", "rank 1"]
    )
    axes.tick_params(labelsize=8)
    axes.set_ylabel("requests left", fontsize=8, y=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _switch(axes: Axes, switch: SeenSwitch, count: int) -> None:
    """A pause at its true width, but at least visible."""
    over = switch.at + switch.pause
    axes.axvspan(switch.at, over, ymax=0.7, color=PAUSE, linewidth=0.9)
    what = f"switch to {switch.after} aborted" if switch.error else f"to {switch.after} with {switch.requests} left"
    axes.text(over, 1.05 * count, f" {what},\n paused {switch.pause * 1e3:.0f} ms", fontsize=8, color=PAUSE, va="top")


def _legend() -> list[Patch | Line2D]:
    return [
        *(Patch(color=color, label=layout) for layout, color in COLORS.items()),
        Patch(facecolor="white", edgecolor=IDLE, hatch="//////", label="rank without work"),
        Line2D([], [], color=PAUSE, label="pause of a switch"),
    ]


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return pictures.save(figure, path)
