"""``acceptance.png``: what a switch costs, and what it gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_pat.acceptance.results import Report
from sglang_pat.tools import pictures

WAYS = {"ours": pictures.OURS, "PAT's": pictures.OTHER}


def draw(report: Report, path: Path) -> Path | None:
    """Pause and step times, as far as they were measured; None if neither was."""
    figures = {result.name: result.figures for result in report.results if result.verdict != "failed"}
    drawn = [(part, figures[name]) for name, part in (("pause", _pause), ("step-times", _steps)) if figures.get(name)]
    if not drawn:
        return None
    figure, axes = pictures.panels(len(drawn), width=5.6)
    for one, (part, found) in zip(axes, drawn, strict=True):
        part(one, found)
    pictures.footer(figure, f"{report.options['device']}, {report.options['ranks']} ranks; steps: {report.counted}")
    return pictures.save(figure, path)


def pause_title(found: dict[str, Any]) -> str:
    """The longest merge of each way."""
    ours, theirs = (max(p["up"] for p in found["points"] if p["way"] == way) for way in WAYS)
    return f"A merge stops decoding for {ours * 1e3:.0f} ms at most, PAT's way for {theirs * 1e3:.0f}"


def steps_title(found: dict[str, Any]) -> str:
    """Whether a higher degree is faster for one request."""
    best = min(found["one"], key=found["one"].get)
    if best == "1":
        return "A lone request decodes fastest in tp1"
    return f"A lone request decodes {found['one']['1'] / found['one'][best]:.1f} times as fast in tp{best}"


def _pause(axes: Any, found: dict[str, Any]) -> None:
    """Pause over the tokens alive, a line a way; dashed: a restart."""
    for way, shade in WAYS.items():
        points = [point for point in found["points"] if point["way"] == way]
        axes.plot(
            [point["tokens"] for point in points], [point["up"] * 1e3 for point in points], "o-", label=way,
            color=shade,
        )  # fmt: skip
    axes.axhline(found["restart"] * 1e3, color=pictures.FAINT, linestyle="--", label="restart")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    pictures.plain_log(axes.xaxis, sorted({point["tokens"] for point in found["points"]}))
    pictures.plain_decades(axes.yaxis)
    pictures.title(axes, pause_title(found), 58)
    pictures.labels(axes, "KV tokens alive", "pause, ms")
    axes.legend(frameon=False, fontsize=8.5)


def _steps(axes: Any, found: dict[str, Any]) -> None:
    """Step time over the requests running, a line a layout."""
    degrees = tuple(int(tp) for tp in found["one"])
    totals = sorted({int(name.split()[0]) for name in found["steps"]})
    for tp in degrees:
        values = [found["steps"][f"{total} tp{tp}"] * 1e3 for total in totals]
        axes.plot(totals, values, "o-", color=pictures.color(degrees, tp), label=f"tp{tp}")
    axes.set_xscale("log", base=2)
    pictures.plain_log(axes.xaxis, totals)
    axes.set_ylim(bottom=0)
    pictures.title(axes, steps_title(found), 58)
    pictures.labels(axes, "requests running in all", "decode step, ms")
    axes.legend(frameon=False, fontsize=8.5)
