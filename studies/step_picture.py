"""The picture of ``rl_step``: a step by stage, with one technique after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.patches import Patch

from sglang_pat.tools import pictures

STAGES = {"rollout, s": ("rollout", pictures.BLUE), "reward, s": ("waiting for rewards", pictures.ORANGE),
          "training, s": ("training", pictures.OURS)}  # fmt: skip
"""Columns of the table: name and colour of a stage."""

Found = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Figures of a step by setting, row and column."""


def read_lines(lines: Sequence[Mapping[str, str]]) -> Found:
    """Of the table, by its heads."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in lines:
        numbers = {head: float(cell) for head, cell in line.items() if head not in ("setting", "with")}
        found.setdefault(line["setting"], {})[line["with"]] = numbers
    return found


def format_title(found: Found) -> str:
    last = [list(rows.values())[-1] for rows in found.values()]
    ours = pictures.format_span((row["times as fast"] for row in last), ".1f")
    theirs = pictures.format_span((row["paper"] for row in last), ".1f")
    return f"Simulated: with all of it a step is {ours} times as fast (RollPacker reports {theirs})"


def draw(found: Found, source: str, path: Path) -> Path:
    """A panel a setting; beside a bar also what the paper reports."""
    panels = {
        f"{setting} tokens": {row if row == "plain" else f"+ {row}": figures for row, figures in rows.items()}
        for setting, rows in found.items()
    }
    about = f"Modelled profiles, RollPacker's settings, a node's share of the batch; rows are cumulative. {source}"
    return draw_panels(panels, format_title(found), about, path)


def draw_panels(panels: Found, title: str, about: str, path: Path) -> Path:
    """A bar a row; beside it how many times as fast it is as the first one."""
    figure, axes_of_panels = pictures.make_panels(len(panels), width=4.6, height=3.4)
    for axes, (name, rows) in zip(axes_of_panels, panels.items(), strict=True):
        for place, row in enumerate(rows.values()):
            left = 0.0
            for stage, (_, color) in STAGES.items():
                axes.barh(place, row[stage], left=left, color=color, height=0.7)
                left += row[stage]
            said = f"{row['times as fast']:.2f}×" if place else f"{row['step, s']:.0f} s"
            paper = f"  (paper {row['paper']:.2f})" if place and "paper" in row else ""
            axes.text(left, place, f" {said}{paper}", va="center", fontsize=8.5, color=pictures.LINE)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(row["step, s"] for row in rows.values()))
        axes.grid(axis="y", visible=False)
        pictures.set_panel_title(axes, name)
        pictures.set_labels(axes, "seconds of a step", "")
    handles = [Patch(color=color, label=name) for name, color in STAGES.values()]
    figure.legend(handles=handles, fontsize=8.5, frameon=False, loc="outside lower left", ncols=3)
    pictures.set_figure_title(figure, title)
    pictures.set_footer(figure, about, 0.6)
    return pictures.save(figure, path)
