"""The picture of ``policies``: what ``survival`` and ``pat`` lose against the oracle and the static layouts.

On profiles with this package's switch costs; on those with PAT's only if there are no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from sglang_pat.tools import pictures

FLOOR = 1e-4
"""Regrets below are drawn here."""
HALF, WITHIN = 0.5, 0.98
"""Goals: most of ``pat``'s regret, and least of the best static layout's speed."""
PAT_COSTS = "-pat-costs"
"""Ending of the names of profiles with PAT's switch costs.  No engine here has these costs."""
Cells = Sequence[dict]
"""Cells of ``policies --json``: each is ``policies.PolicyCell`` as a dict."""


def draw(cells: Cells, path: Path) -> Path:
    """Left: regret of one policy over the other's, cell by cell; right: speed against the best static layout."""
    cells = [cell for cell in cells if not cell["profile"].endswith(PAT_COSTS)] or cells
    figure, (left, right) = pictures.make_panels(2, width=6.4, height=5.2)
    for number, profile in enumerate(dict.fromkeys(cell["profile"] for cell in cells)):
        shade = pictures.SERIES[number % len(pictures.SERIES)]
        style = dict(marker="o", linestyle="none", color=shade, ms=4, alpha=0.8, label=profile)
        of_profile = [cell for cell in cells if cell["profile"] == profile]
        left.plot(_apply_floor(of_profile, "pat_decided"), _apply_floor(of_profile, "survival_decided"), **style)
        right.plot(
            [c["static_over_oracle"] for c in of_profile], [c["static_over_survival"] for c in of_profile], **style
        )
    _draw_regrets(left, cells)
    _draw_statics(right, cells)
    figure.legend(
        *left.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower left", ncols=4,
        columnspacing=1.0, handletextpad=0.2,
    )  # fmt: skip
    pictures.set_figure_title(figure, format_title(cells))
    return pictures.save(figure, path)


def format_title(cells: Cells) -> str:
    """Title with the mean regrets of the decisions."""
    ours, theirs = mean(c["survival_decided"] for c in cells), mean(c["pat_decided"] for c in cells)
    return (
        f"By its decisions survival loses {ours:.2%} of the time against the oracle, pat {theirs:.2%} "
        f"({len(cells)} simulated cells)"
    )


def format_regret_count(cells: Cells) -> str:
    """Number of cells in which ``survival`` is the worse one of the two."""
    more = sum(max(c["survival_decided"], FLOOR) > max(c["pat_decided"], FLOOR) for c in cells)
    return f"survival loses more than pat in {more} of {len(cells)} cells"


def format_static_count(cells: Cells) -> str:
    """Number of cells in which ``survival`` keeps up with the best static layout, and in which the oracle does."""
    ours, oracle = (sum(c[f"static_over_{name}"] >= WITHIN for c in cells) for name in ("survival", "oracle"))
    cells_of = f"survival in {ours} of {len(cells)} cells, the oracle in {oracle}"
    return f"At least {WITHIN:.0%} of the best static speed: {cells_of}"


def _apply_floor(cells: Cells, name: str) -> list[float]:
    return [max(cell[name], FLOOR) for cell in cells]


def _draw_regrets(axes: Axes, cells: Cells) -> None:
    """Draw regrets, with lines for as much and half as much."""
    ends = [FLOOR, 1.5 * max(*_apply_floor(cells, "pat_decided"), *_apply_floor(cells, "survival_decided"))]
    axes.plot(ends, ends, color=pictures.LINE, linewidth=0.9)
    axes.plot(ends, [HALF * end for end in ends], ":", color=pictures.LINE, linewidth=0.9)
    for share, text in ((1.0, "as much"), (HALF, "half as much")):
        axes.text(ends[1], share * ends[1], f" {text}", fontsize=8, color=pictures.FAINT, va="center")
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    pictures.set_labels(axes, "pat: regret of its decisions", "survival: regret of its decisions")
    pictures.set_panel_title(axes, format_regret_count(cells))


def _draw_statics(axes: Axes, cells: Cells) -> None:
    """Draw speeds, with lines for as fast as the oracle and for the goal."""
    values = [c[f"static_over_{name}"] for c in cells for name in ("survival", "oracle")]
    ends = [min(values), max(values)]
    axes.plot(ends, ends, color=pictures.LINE, linewidth=0.9)
    axes.axhline(WITHIN, color=pictures.LINE, linestyle=":", linewidth=0.9)
    axes.text(ends[0], WITHIN, "2% slower than the best static", fontsize=8, color=pictures.FAINT, va="bottom")
    pictures.set_labels(
        axes, "oracle: times as fast as the best static layout", "survival: times as fast as the best static layout"
    )
    pictures.set_panel_title(axes, format_static_count(cells), 60)
