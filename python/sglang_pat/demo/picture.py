"""``timeline.png``: the runs one below the other on one time axis."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from sglang_pat.demo import timeline  # noqa: E402
from sglang_pat.demo.records import Run, SeenSwitch  # noqa: E402
from sglang_pat.demo.report import Report  # noqa: E402

SPLIT = ("#2f6db5", "#659fda")
"""Group 0 and 1 while every rank works for itself."""
MERGED = "#ee8a2c"
"""The one group of all ranks."""
UNKNOWN, WAIT, PAUSE, LINE, FAINT = "#8c9aa8", "#c3c9d1", "#b3202c", "#22272e", "#68717b"
TINT = {False: "#e9f1fa", True: "#fdf0e2"}
"""Behind the bars: split, merged."""

LEFT, WIDTH = 0.075, 0.915
"""Of the figure's width."""
RANK_HEIGHT, GAP, FOOT = 0.17, 0.44, 0.5
"""Inches of a rank's lane, of the title above a run, and of the time axis."""
ROW_HEIGHT, LEAST_HEIGHT = {True: 0.165, False: 0.075}, 0.8
"""Inches of a request's row (adaptive run: higher), and of all of them at least."""

DISTURBED = 0.1
"""Other programs' share of the cores from which on a run's title mentions them."""


def draw(report: Report) -> Figure:
    """One block a run: a lane for each rank, below it a bar for each request."""
    runs, switch_at = report.runs, report.options["switch_at"]
    until = max(run.wall for run in runs) * 1.12
    lanes = 2 * RANK_HEIGHT
    bars = [max(LEAST_HEIGHT, len(run.answers) * ROW_HEIGHT[run.adaptive]) for run in runs]
    total = sum(bars) + len(runs) * (lanes + GAP) + FOOT
    figure = plt.figure(figsize=(10, total), dpi=160, facecolor="white")
    bottom = total
    for run, height in zip(runs, bars, strict=True):
        bottom -= GAP + lanes
        top = figure.add_axes((LEFT, bottom / total, WIDTH, lanes / total))
        bottom -= height
        body = figure.add_axes((LEFT, bottom / total, WIDTH, height / total), sharex=top)
        _lanes(top, run, until)
        _bars(body, run, until)
        if run.adaptive:
            _threshold(body, switch_at, until)
        top.set_xlim(0, until)
        body.tick_params(labelbottom=run is runs[-1])
    body.set_xlabel("seconds since the first request", fontsize=9.5, loc="left")
    figure.text(LEFT + WIDTH, 0.11 / total, report.summary(), fontsize=8, color=FAINT, ha="right")
    return figure


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _lanes(axes: Axes, run: Run, until: float) -> None:
    """The ranks: what each worked on until the last request was done. Idle ones are hatched."""
    for lane in timeline.lanes(run, run.wall):
        low, high = min(lane.ranks), max(lane.ranks) + 1
        length, middle = lane.end - lane.start, (low + high) / 2
        style = dict(color=_color(lane.layout, lane.group), linewidth=0)
        if not lane.busy:
            style = dict(facecolor="white", edgecolor="#b9c0c8", hatch="/////", linewidth=0.6)
        axes.broken_barh([(lane.start, length)], (low + 0.05, high - low - 0.1), **style)
        if lane.busy and length > 0.2 * until:
            ranks = " and ".join(map(str, lane.ranks))
            text = f"{lane.layout}: rank{'s' * (len(lane.ranks) > 1)} {ranks}"
            at = lane.start + 0.006 * until
            axes.text(at, middle + 0.04, text, color="white", fontsize=8.5, va="center")
        elif not lane.busy and length > 0.05 * until:
            box = dict(facecolor="white", edgecolor="none", pad=1.2)
            at = (lane.start + lane.end) / 2
            axes.text(at, middle, "idle", color=FAINT, fontsize=8, va="center", ha="center", bbox=box)
    axes.set_ylim(2, 0)
    axes.set_yticks([0.5, 1.5], ["rank 0", "rank 1"], fontsize=8.5)
    axes.tick_params(length=0, labelbottom=False)
    title = f"adaptive: starts as {run.base}" if run.adaptive else run.name
    title += f"  ·  {run.wall:.1f} s  ·  {run.tokens_per_second:.1f} tokens/s"
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=5)
    if run.others > DISTURBED:
        text = f"disturbed: other programs took {run.others:.0%} of the cores"
        axes.set_title(text, loc="right", fontsize=8.5, color=FAINT, pad=5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _bars(axes: Axes, run: Run, until: float) -> None:
    """The requests, with the layouts behind them, the pauses, and the count of running requests as a line."""
    count = len(run.answers)
    for band in timeline.bands(run, run.wall):
        axes.axvspan(band.start, band.end, color=TINT[band.merged], linewidth=0)
    for bar in timeline.bars(run):
        color = WAIT if bar.what == "wait" else _color(bar.what, bar.group)
        axes.broken_barh([(bar.start, bar.end - bar.start)], (bar.row + 0.12, 0.76), color=color, linewidth=0)
    times, counts = timeline.running(run)
    axes.step(times, counts, where="post", color=LINE, linewidth=1.3)
    for switch in run.switches:
        if switch.requests or switch.error:
            _pause(axes, switch, count, until)
    last = run.switches[-1].after if run.adaptive and run.switches and not run.switches[-1].requests else ""
    end = f" {run.wall:.1f} s" + (f"\n empty: back\n to {last}" if last else "")
    axes.text(run.wall, 0.3, end, fontsize=8.5, color=LINE, va="bottom", linespacing=1.2)
    axes.set_ylim(0, count * 1.04 + 0.3)
    axes.set_yticks(range(0, count + 1, 4 if run.adaptive or count < 8 else 8))
    axes.set_ylabel("requests", fontsize=9)
    axes.tick_params(labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _pause(axes: Axes, switch: SeenSwitch, count: int, until: float) -> None:
    """A pause at its true width, but at least visible, and what happened in it."""
    axes.axvspan(switch.at, switch.at + switch.pause, color=PAUSE, linewidth=0.9)
    text = f"switch to {switch.after}\n{switch.pause * 1e3:.0f} ms pause\n"
    text += f"{switch.requests} requests, {switch.tokens} KV tokens\n{switch.moved_bytes / 1e6:.1f} MB moved"
    if switch.error:
        text = f"switch to {switch.after} aborted\nafter {switch.pause * 1e3:.0f} ms"
    right = switch.at < 0.75 * until
    axes.annotate(
        text,
        (switch.at + switch.pause if right else switch.at, count),
        xytext=(5 if right else -5, 0),
        textcoords="offset points",
        fontsize=8.5,
        color=PAUSE,
        ha="left" if right else "right",
        va="top",
        linespacing=1.3,
    )


def _threshold(axes: Axes, switch_at: int, until: float) -> None:
    axes.axhline(switch_at, color=FAINT, linewidth=0.8, linestyle=(0, (2, 3)))
    text = f"switches with {switch_at} left"
    axes.text(0.998 * until, switch_at + 0.25, text, fontsize=8.5, ha="right", color=FAINT)


def _color(layout: str, group: int | None) -> str:
    if layout.endswith("dp1"):
        return MERGED
    return UNKNOWN if group is None else SPLIT[group % len(SPLIT)]
