"""``replay.png``: what each policy takes, and which layout it is in when."""

# The types of matplotlib's own functions are incomplete.
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sglang_pat.replay.compare import regrets
from sglang_pat.replay.simulate import Run
from sglang_pat.tools import pictures

Runs = dict[str, list[Run]]
"""Of every policy, by round."""


def draw(runs: Runs, about: str, path: Path) -> Path:
    """Bars of the mean time; and for the last round which layout when, and how many requests were left."""
    figure, axes = pictures.plt.subplots(
        3, 1, figsize=(10, 3.4 + 0.6 * len(runs)), height_ratios=[1, 0.8, 0.8], layout="constrained"
    )
    for one in axes:
        pictures.tidy(one)
    degrees = sorted({tp for found in runs.values() for _, tp, _ in found[-1].timeline})
    _bars(axes[0], runs)
    _lanes(axes[1], runs, degrees)
    _load(axes[2], runs)
    longest = max(found[-1].seconds for found in runs.values())
    for one in axes[1:]:
        one.set_xlim(0, longest)
    pictures.message(figure, title(runs))
    pictures.footer(figure, f"Simulated: {about}")
    return pictures.save(figure, path)


def title(runs: Runs) -> str:
    """What ``survival`` loses against the oracle, and how it compares with other policies and static layouts.

    Where it takes no part, the first policy that does.
    """
    mean = {name: float(np.mean([run.seconds for run in found])) for name, found in runs.items()}
    statics = [name for name in runs if name.startswith("static:")]
    policies = [name for name in runs if name != "oracle" and name not in statics] or statics
    if not policies:
        return "What the oracle does"
    first = "survival" if "survival" in policies else policies[0]
    said = f"{first} takes {_regret(runs, first)} time than the oracle"
    if others := [f"{name} {_regret(runs, name)}" for name in policies if name != first]:
        said += f" ({', '.join(others)})"
    if statics and policies is not statics:
        best = min(statics, key=lambda name: mean[name])
        said += f", and is {mean[best] / mean[first]:.2f} times as fast as the best static layout shown "
        said += f"(tp{best.partition(':')[2]})"
    return said


def _regret(runs: Runs, name: str) -> str:
    share = float(regrets(runs, name).mean())
    return f"{abs(share):.1%} {'less' if share < 0 else 'more'}"


def _shade(name: str) -> str:
    """Of a policy's bar."""
    return {"survival": pictures.OURS, "oracle": pictures.LIGHT}.get(name, pictures.OTHER)


def _bars(axes: Axes, runs: Runs) -> None:
    """Mean seconds of a round; beside them the regret."""
    means = {name: float(np.mean([run.seconds for run in found])) for name, found in runs.items()}
    axes.barh(list(means), list(means.values()), color=[_shade(name) for name in means], height=0.7)
    for place, (name, seconds) in enumerate(means.items()):
        axes.text(seconds, place, f" {seconds:.1f} s  {regrets(runs, name).mean():+.1%}", va="center", fontsize=8.5)
    axes.set_xlim(0, 1.2 * max(means.values()))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    rounds = len(next(iter(runs.values())))
    pictures.labels(axes, f"seconds of generation, mean of {rounds} rounds, and how much more than the oracle", "")


def _lanes(axes: Axes, runs: Runs, degrees: Sequence[int]) -> None:
    """The layout over time in the last round."""
    for name, found in runs.items():
        run = found[-1]
        ends = [start for start, _, _ in run.timeline[1:]] + [run.seconds]
        for (start, tp, _), end in zip(run.timeline, ends, strict=True):
            axes.barh(name, end - start, left=start, color=pictures.color(degrees, tp), height=0.7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    patches = [Patch(color=pictures.color(degrees, tp), label=f"tp{tp}") for tp in degrees]
    axes.legend(handles=patches, fontsize=8.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    pictures.labels(axes, "seconds, last round", "")


def _load(axes: Axes, runs: Runs) -> None:
    """Requests left over time in the last round."""
    others = cycle(shade for shade in pictures.SERIES if shade != pictures.OURS)
    for name, found in runs.items():
        timeline = found[-1].timeline
        axes.step(
            [start for start, _, _ in timeline], [running for _, _, running in timeline], where="post", label=name,
            color=pictures.OURS if name == "survival" else next(others), linewidth=1.2,
        )  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    pictures.labels(axes, "seconds, last round", "requests left")
