"""The look of all pictures, in one place: matplotlib without a display, colours, panels, titles, files.

A picture's title is its message: a sentence that is computed from what is drawn, whichever way the figures turn out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
matplotlib.rcParams["text.parse_math"] = False  # names in a profile are names, whatever is in them

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from sglang_pat import files  # noqa: E402

BLUE, ORANGE, GREEN, PURPLE, RED, BROWN = "#2f6db5", "#ee8a2c", "#3a9a74", "#8a5bb5", "#b3202c", "#7a6a58"
STEEL, PALE_PURPLE = "#9fb4cc", "#c8b6d9"
LINE, FAINT, LIGHT, GRID = "#22272e", "#68717b", "#c3c9d1", "#e3e7ec"
"""Greys from black to nearly white: text and lines, small print, what is in the background, the grid."""

LAYOUT = (BLUE, ORANGE, PURPLE, BROWN, RED)
"""Colours of layouts, by place of the degree among the candidates."""
OURS, OTHER = GREEN, FAINT
"""Colours of what this package does (``survival``, a switch of ours), and of what it is held against (PAT's way)."""
SERIES = (BLUE, ORANGE, GREEN, PURPLE, BROWN, RED)
"""Colours of things of one kind, where no layouts are shown by colour."""
DPI = 150


def choose_color(degrees: Sequence[int], tp: int) -> str:
    return LAYOUT[degrees.index(tp) % len(LAYOUT)]


def format_layout(ranks: int, tp: int) -> str:
    return f"tp{tp}×dp{ranks // tp}"


def format_span(values: Iterable[float], form: str = ".2f") -> str:
    """The span of values as a title says it, from the least to the largest: "0.99 to 1.18"; one number where both are
    written alike."""
    values = list(values)
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def make_panels(count: int, width: float = 5.2, height: float = 3.8, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes, side by side, ``columns`` in a row at most."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(6.4, width * columns), height * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for extra in flat[count:]:
        extra.set_visible(False)
    for one in flat[:count]:
        tidy(one)
    return figure, flat[:count]


def tidy(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8.5)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def set_log_axis(axis, values: Sequence[float]) -> None:
    """Set a base-2 axis with plain numbers at ``values``, or at some of many."""
    axis.set_ticks(values[:: -(-len(values) // 9)])
    axis.set_major_formatter(lambda value, _: f"{value:g}" if value < 10000 else f"{value / 1024:g}K")
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def set_figure_title(figure: Figure, text: str) -> None:
    """Set the title of a whole figure: a sentence, wrapped to the figure's width."""
    lines = fill(text, int(9.7 * figure.get_figwidth()))
    figure.suptitle(lines, x=0.01, ha="left", fontsize=12, fontweight="bold", color=LINE)


def set_panel_title(axes: Axes, text: str, columns: int = 200) -> None:
    """Set the title of one panel, wrapped to ``columns`` characters."""
    axes.set_title(fill(text, columns), loc="left", fontsize=10.5, fontweight="bold", pad=6)


def set_labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)


def set_footer(figure: Figure, text: str, share: float = 1.0) -> None:
    """Set small print at the lower right: what was measured where; wrapped to this share of the figure's width."""
    lines = fill(text, int(15 * share * figure.get_figwidth()))
    figure.supxlabel(lines, fontsize=8, color=FAINT, x=0.995, ha="right")


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure``, whole or not at all, and release it."""
    files.write(render_figure(figure, path.suffix.removeprefix(".") or "png"), path)
    return path


def render_figure(figure: Figure, form: str = "png") -> bytes:
    """``figure`` as the content of a file; it is released."""
    content = BytesIO()
    try:
        figure.savefig(content, format=form, dpi=DPI, facecolor="white")
    finally:
        plt.close(figure)
    return content.getvalue()
