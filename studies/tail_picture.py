"""The picture of ``tail_batching``: seconds of a round without tail batching, with it, and with adaptive TP on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.patches import Patch

from sglang_pat.tools import pictures

BASE, ADAPTIVE, TAIL, BOTH = "without", "adaptive TP", "tail batching", "both"
WAYS = {BASE: pictures.LIGHT, ADAPTIVE: pictures.OURS, TAIL: pictures.PURPLE, BOTH: pictures.LINE}
NAMES = {"base on a node": BASE, "base on a node, adaptive": ADAPTIVE, "strict on a node": TAIL,
         "strict on a node, adaptive": BOTH}  # fmt: skip
"""Ways by the names that the simulations give them."""
MIDDLE = 0.5
"""Correlation of the lengths of one prompt's responses for the bars; lines show the other correlations."""

Found = Mapping[tuple[str, float], dict[str, float]]
"""Seconds of a round by way, by (setting, correlation)."""


def make_found(found: Mapping[tuple, dict]) -> Found:
    """What is drawn of all simulations."""
    seconds: dict[tuple[str, float], dict[str, float]] = {}
    for (name, setting, rho), values in found.items():
        if name in NAMES:
            seconds.setdefault((setting, rho), {})[NAMES[name]] = values["seconds"]
    return seconds


def format_title(found: Found) -> str:
    gains = pictures.format_span((seconds[BASE] / seconds[BOTH] for seconds in found.values()), ".1f")
    return f"Simulated: a round is {gains} times as fast with tail batching and adaptive TP"


def draw(found: Found, source: str, path: Path) -> Path:
    """Bars: a round's time at the middle correlation, as a share of the time without; lines: other correlations."""
    figure, (axes,) = pictures.make_panels(1, width=9.0, height=4.4)
    settings = list(dict.fromkeys(setting for setting, _ in found))
    for place, setting in enumerate(settings):
        by_rho = {rho: seconds for (name, rho), seconds in found.items() if name == setting}
        middle = by_rho.get(MIDDLE, next(iter(by_rho.values())))
        for number, (way, color) in enumerate(WAYS.items()):
            at, height = place + 0.2 * (number - 1.5), middle[way] / middle[BASE]
            others = [seconds[way] / seconds[BASE] for seconds in by_rho.values()]
            axes.bar(at, height, 0.18, color=color)
            if way != BASE:
                axes.vlines(at, min(others), max(others), color=pictures.FAINT, linewidth=1.2)
            top = max(height, *others) + 0.015
            axes.text(at, top, f"{middle[way]:.0f} s", ha="center", fontsize=8, color=pictures.LINE)
    axes.set_xticks(range(len(settings)), [f"{name} tokens" for name in settings])
    axes.set_ylim(0, 1.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="x", visible=False)
    pictures.set_labels(axes, "", "time of a round, of that without")
    handles = [Patch(color=color, label=way) for way, color in WAYS.items()]
    axes.legend(handles=handles, fontsize=8.5, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    correlations = pictures.format_span((rho for _, rho in found), "g")
    pictures.set_figure_title(figure, format_title(found))
    footer = (
        f"Modelled profiles, RollPacker's settings, a node's share of the batch. Bars: lengths of one prompt's "
        f"responses correlated by {MIDDLE}; lines: by {correlations}. {source}"
    )
    pictures.set_footer(figure, footer)
    return pictures.save(figure, path)
