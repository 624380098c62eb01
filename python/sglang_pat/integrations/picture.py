"""What a training run looked like: reward, where a step's time went, and the layouts of each engine over time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_pat.coordinator.decision_log import load_decision

PARTS = {"generation": "#2f6db5", "training": "#ee8a2c", "weight sync": "#b3202c", "other": "#c3c9d1"}
"""Parts of a step and their colours."""
LAYOUTS = ("#bcd4ee", "#659fda", "#2f6db5", "#153e72")
"""By degree, the lowest first."""


@dataclass
class Step:
    """``seconds``: of each of :data:`PARTS`; ``reward``: mean of the step."""

    reward: float
    seconds: dict[str, float]

    @classmethod
    def of(cls, reward: float, total: float, parts: dict[str, float]) -> Step:
        """A step of ``total`` seconds; what is in none of ``parts`` is ``other``."""
        return cls(reward, parts | {"other": max(0.0, total - sum(parts.values()))})


@dataclass
class Visit:
    """An engine was in a layout of degree ``tp`` from ``start`` to ``end``, seconds of one clock, with requests."""

    start: float
    end: float
    tp: int


def visits(log: Path) -> list[Visit]:
    """From a decision log (``--pat-log``): the times with requests in the engine, cut where the layout changes."""
    found: list[Visit] = []
    open_ = False
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event.get("event") != "decision":
            continue
        snapshot, _ = load_decision(event)
        if open_:
            found[-1].end = snapshot.now
        if not snapshot.requests:
            open_ = False
        elif not open_ or found[-1].tp != snapshot.tp:
            found.append(Visit(snapshot.now, snapshot.now, snapshot.tp))
            open_ = True
    return found


def draw(path: Path, steps: Sequence[Step], logs: Sequence[Path]) -> Path:
    """Write the picture to ``path``; one row of layouts for each log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    engines = [visits(log) for log in logs]
    heights = [1.2, 1.6, 0.3 + 0.25 * max(1, len(engines))]
    figure, (reward, time, layouts) = pyplot.subplots(
        3, 1, figsize=(9, sum(heights) + 1.6), dpi=140, height_ratios=heights, layout="constrained"
    )
    numbers = range(1, len(steps) + 1)
    reward.plot(numbers, [step.reward for step in steps], marker="o", color=PARTS["generation"])
    reward.set_ylabel("reward")
    bottom = [0.0] * len(steps)
    for part, colour in PARTS.items():
        values = [step.seconds.get(part, 0.0) for step in steps]
        time.bar(numbers, values, bottom=bottom, color=colour, label=part)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    time.set_ylabel("seconds a step")
    time.set_xlabel("step")
    time.legend(ncols=len(PARTS), fontsize=8, frameon=False, loc="upper right")
    for axes in (reward, time):
        axes.set_xticks(list(numbers))
    begin = min((visit.start for engine in engines for visit in engine), default=0.0)
    degrees = sorted({visit.tp for engine in engines for visit in engine})
    colours = {tp: LAYOUTS[min(index, len(LAYOUTS) - 1)] for index, tp in enumerate(degrees)}
    for row, engine in enumerate(engines):
        for visit in engine:
            span = visit.start - begin, visit.end - visit.start
            layouts.broken_barh([span], (row + 0.1, 0.8), color=colours[visit.tp])
    layouts.set_yticks([row + 0.5 for row in range(len(engines))], [f"engine {row}" for row in range(len(engines))])
    layouts.set_xlabel("seconds since the first request")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    layouts.legend(handles, [f"tp{tp}" for tp in colours], ncols=max(1, len(colours)), fontsize=8, frameon=False)
    switches = sum(one.tp != other.tp for engine in engines for one, other in zip(engine, engine[1:], strict=False))
    whole = sum(sum(step.seconds.values()) for step in steps)
    share = sum(step.seconds.get("generation", 0.0) for step in steps) / whole if whole else 0.0
    figure.suptitle(f"{len(steps)} steps: {share:.0%} of the time generates, the layout changed {switches} times")
    figure.savefig(path)
    pyplot.close(figure)
    return path
