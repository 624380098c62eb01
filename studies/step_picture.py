"""The picture of ``rl_step``: a step by stage, with one technique after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sglang_pat.tools import pictures

STAGES = {"rollout, s": ("rollout", pictures.BLUE), "reward, s": ("waiting for rewards", pictures.ORANGE),
          "training, s": ("training", pictures.OURS)}  # fmt: skip
"""Columns of the table: name and colour of a stage."""

Found = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Figures of a step by setting, row and column."""


def read_lines(lines: Sequence[Mapping[str, str]]) -> Found:
    """Rows of the table by its heads; a cell with a range in brackets counts by what stands before it."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for line in lines:
        numbers = {head: float(cell.split()[0]) for head, cell in line.items() if head not in ("setting", "with")}
        figures.setdefault(line["setting"], {})[line["with"]] = numbers
    return figures


def format_title(found: Found) -> str:
    last = [list(rows.values())[-1] for rows in found.values()]
    ours = pictures.format_span((row["times as fast"] for row in last), ".1f")
    theirs = pictures.format_span((row["paper"] for row in last), ".1f")
    return f"Simulated: with all of it a step is {ours} times as fast (RollPacker reports {theirs})"


def draw(found: Found, source: str, path: Path) -> Path:
    """A panel a setting, one below the other; beside a bar its length, and what the paper reports."""
    figure, panels = pictures.make_panels(len(found), width=8.0, height=2.1, columns=1)
    for axes, (setting, rows) in zip(panels, found.items(), strict=True):
        draw_bars(axes, {row if row == "plain" else f"+ {row}": figures for row, figures in rows.items()})
        pictures.set_panel_title(axes, f"{setting} tokens")
    pictures.set_labels(panels[-1], "seconds of a step", "")
    handles = [Patch(color=color, label=name) for name, color in STAGES.values()]
    figure.legend(handles=handles, fontsize=10, frameon=False, loc="outside lower left", ncols=3)
    pictures.set_figure_title(figure, format_title(found))
    footer = f"Modelled profiles; rows are cumulative. {source}"
    pictures.set_footer(figure, footer, 0.5)
    return pictures.save(figure, path)


def draw_bars(axes: Axes, rows: Mapping[str, Mapping[str, float]]) -> None:
    """A bar a row, by stage; beside it its seconds, how many times as fast as the first one, the paper's figure."""
    for place, row in enumerate(rows.values()):
        left = 0.0
        for stage, (_, color) in STAGES.items():
            axes.barh(place, row[stage], left=left, color=color, height=0.72)
            left += row[stage]
        label = f"{row['step, s']:.0f} s"
        if place:
            label += f": {row['times as fast']:.2f}× (paper {row['paper']:.2f})"
        axes.text(left, place, f" {label}", va="center", fontsize=10, color=pictures.LINE)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(row["step, s"] for row in rows.values()))
    axes.grid(axis="y", visible=False)
