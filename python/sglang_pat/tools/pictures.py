"""The look of all figures: that of the demonstration's picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

LAYOUT = ("#2f6db5", "#ee8a2c", "#3a9a74", "#8a5bb5", "#b3202c")
"""By place of the degree among the candidates; the first two as in the demonstration."""
LINE, FAINT, GRID = "#22272e", "#68717b", "#e3e7ec"
DPI = 150


def color(degrees: tuple[int, ...], tp: int) -> str:
    return LAYOUT[degrees.index(tp) % len(LAYOUT)]


def name(ranks: int, tp: int) -> str:
    return f"tp{tp}×dp{ranks // tp}"


def panels(count: int, width: float = 5.2, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes, side by side, three in a row at most."""
    columns = min(3, count)
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


def plain_log(axis, values: list[float]) -> None:
    """A base-2 axis with plain numbers at ``values``."""
    axis.set_ticks(thinned(values))
    axis.set_major_formatter(lambda value, _: f"{value:g}" if value < 10000 else f"{value / 1024:g}K")
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def plain_decades(axis) -> None:
    """A decimal logarithmic axis with plain numbers at 1, 2 and 5."""
    axis.set_major_locator(matplotlib.ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def thinned(values: list[float], most: int = 9) -> list[float]:
    """At most ``most`` of the ascending ``values``, each at least 1.4 times the one before."""
    kept: list[float] = []
    for value in values:
        if not kept or value >= 1.4 * kept[-1]:
            kept.append(value)
    return kept if len(kept) <= most else kept[:: -(-len(kept) // most)]


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, fontweight="bold", pad=6)


def labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)


def footer(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=8, color=FAINT, x=0.995, ha="right")


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` and release it."""
    figure.savefig(path, dpi=DPI, facecolor="white")
    plt.close(figure)
    return path
