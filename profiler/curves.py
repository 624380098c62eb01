"""Throughput while a batch drains, measured and predicted (PAT Fig. 14)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_pat.tools import pictures


def throughput_figure(
    folder: Path, layout: str, curve: dict[int, tuple[float, float]], row: dict[str, Any], place: int
) -> Path:
    """Draw ``remaining → (measured, predicted)`` tokens/s; the batch drains from left to right."""
    figure, (axes,) = pictures.panels(1, width=7.0, height=3.8)
    remaining = sorted(curve, reverse=True)
    color = pictures.LAYOUT[place % len(pictures.LAYOUT)]
    axes.plot(remaining, [curve[n][0] for n in remaining], "o", color=color, ms=5, label="measured")
    axes.plot(remaining, [curve[n][1] for n in remaining], color=pictures.LINE, linewidth=1.4, label="predicted")
    axes.set_xlim(max(remaining) + 0.5, min(remaining) - 0.5)
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0)
    pictures.labels(axes, "requests remaining", "tokens/s of the engine")
    pictures.title(axes, curve_title(layout, row))
    spread = f"{100 * row['repeat to repeat']:.1f} %"
    pictures.footer(figure, f"{row['steps']} steps; the machine's own spread from run to run {spread}")
    axes.legend(fontsize=8.5, frameon=False)
    return pictures.save(figure, folder / f"throughput_{layout.replace('×', '_')}.png")


def curve_title(layout: str, row: dict[str, Any]) -> str:
    """How far off the predictions are."""
    window = next(name for name in row if name.startswith("error a window"))
    return f"{layout}: predicted times of {window.split()[-1]} steps are off by {row[window]:.1%} on average"
