"""A picture of a training run: reward, where a step's time went, and the layouts of each engine over time.

Drawn by ``verl_grpo/run_cpu.py`` and ``openrlhf_grpo/run_cpu.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from sglang_pat.tools import pictures

PARTS = {
    "generation": pictures.STEEL, "training": pictures.PALE_PURPLE, "weight sync": pictures.RED,
    "other": pictures.LIGHT,
}  # fmt: skip
"""Parts of a step, and their colours."""


@dataclass
class Step:
    """A step of a run.

    Attributes:
        reward: mean reward.
        seconds: seconds of each of :data:`PARTS`.
    """

    reward: float
    seconds: dict[str, float]

    @classmethod
    def of(cls, reward: float, total: float, parts: dict[str, float]) -> Step:
        """A step of ``total`` seconds; what is in none of ``parts`` is ``other``."""
        return cls(reward, parts | {"other": max(0.0, total - sum(parts.values()))})


@dataclass
class Visit:
    """Stay of an engine with requests in a layout of degree ``tp``, from ``start`` to ``end``, seconds of one clock."""

    start: float
    end: float
    tp: int


def visits(log: Path) -> list[Visit]:
    """Visits in a decision log (``--pat-log``): the times with requests in the engine, cut where the layout changes."""
    times: list[Visit] = []
    works = False
    for event in map(json.loads, log.read_text().splitlines()):
        if event.get("event") != "decision":
            continue
        now, requests, tp = (event["snapshot"][name] for name in ("now", "requests", "tp"))
        if works:
            times[-1].end = now
        if requests and not (works and times[-1].tp == tp):
            times.append(Visit(now, now, tp))
        works = requests > 0
    return times


def draw(path: Path, steps: Sequence[Step], logs: Sequence[Path]) -> Path:
    """Write the picture to ``path``: reward and time by step, and one row of layouts for each log."""
    engines = [visits(log) for log in logs]
    heights = [1.2, 1.6, 0.3 + 0.25 * max(1, len(engines))]
    figure, (reward, time, layouts) = pictures.plt.subplots(
        3, 1, figsize=(9, sum(heights) + 1.8), height_ratios=heights, layout="constrained"
    )
    for axes in (reward, time, layouts):
        pictures.tidy(axes)
    numbers = list(range(1, len(steps) + 1))
    reward.plot(numbers, [step.reward for step in steps], marker="o", color=pictures.LINE)
    pictures.set_labels(reward, "", "reward")
    _times(time, numbers, steps)
    for axes in (reward, time):
        axes.set_xticks(numbers)
        axes.set_xlim(0.4, len(steps) + 0.6)
    _layouts(layouts, engines)
    pictures.set_figure_title(figure, title(steps, engines))
    return pictures.save(figure, path)


def title(steps: Sequence[Step], engines: Sequence[Sequence[Visit]]) -> str:
    """Title that says what the time went into, and whether the engines switched."""
    switches = sum(one.tp != other.tp for engine in engines for one, other in zip(engine, engine[1:], strict=False))
    whole = sum(sum(step.seconds.values()) for step in steps)
    share = sum(step.seconds.get("generation", 0.0) for step in steps) / whole if whole else 0.0
    changed = f"changed {switches} time{'s' * (switches > 1)}" if switches else "never changed"
    return f"{len(steps)} step{'s' * (len(steps) != 1)}: {share:.0%} of the time generates, the layout {changed}"


def _times(axes: Axes, numbers: Sequence[int], steps: Sequence[Step]) -> None:
    """Seconds of each step, its parts stacked."""
    bottom = [0.0] * len(steps)
    for part, shade in PARTS.items():
        values = [step.seconds.get(part, 0.0) for step in steps]
        axes.bar(numbers, values, bottom=bottom, color=shade, label=part)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.grid(axis="x", visible=False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    pictures.set_labels(axes, "step", "seconds a step")


def _layouts(axes: Axes, engines: Sequence[Sequence[Visit]]) -> None:
    """A row for each engine: its layout over time, while it has requests."""
    begin = min((visit.start for engine in engines for visit in engine), default=0.0)
    degrees = sorted({visit.tp for engine in engines for visit in engine})
    for row, engine in enumerate(engines):
        for visit in engine:
            span = visit.start - begin, visit.end - visit.start
            axes.broken_barh([span], (row + 0.1, 0.8), color=pictures.choose_color(degrees, visit.tp))
    axes.set_yticks([row + 0.5 for row in range(len(engines))], [f"engine {row}" for row in range(len(engines))])
    axes.grid(axis="y", visible=False)
    handles = [pictures.plt.Rectangle((0, 0), 1, 1, color=pictures.choose_color(degrees, tp)) for tp in degrees]
    names = [f"tp{tp}" for tp in degrees]
    axes.legend(handles, names, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    pictures.set_labels(axes, "seconds since the first request", "")
