"""Figures of decisions: which layout is best where, what a switch costs, how good the predictions are."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from profiler.accuracy import Check
from profiler.figures import View
from sglang_pat.predict.profile import SwitchSample
from sglang_pat.tools import pictures

PHASES = ("drain", "capsules", "plan", "kv", "weights", "install", "check")
"""Of a pause, in their order; others follow."""
ROWS = 24
"""Switches shown at most."""


def best_layout(view: View) -> Figure | None:
    """The layout with the shortest step over requests in the engine and their context; hatched: beyond what was
    measured of it.  White lines: how many times as fast as the base layout it is.  None for a grid of one line."""
    points = [p for tp in view.degrees for p in view.points(tp)]
    requests = np.unique(np.geomspace(1, max(p.batch * p.replicas for p in points), 120).round())
    contexts = np.geomspace(min(p.context for p in points), max(p.context for p in points), 100)
    if len(requests) < 2 or contexts[0] == contexts[-1]:
        return None
    x, y = np.meshgrid(requests, contexts)
    seconds = np.stack([view.step(tp, x, y) for tp in view.degrees])
    best = seconds.argmin(axis=0)
    figure, (axes,) = pictures.panels(1, width=8.2, height=4.8)
    axes.grid(False)
    colors = ListedColormap([view.color(tp) for tp in view.degrees])
    axes.pcolormesh(
        x, y, best, cmap=colors, vmin=-0.5, vmax=len(view.degrees) - 0.5, shading="nearest", alpha=0.75, linewidth=0
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    if len(view.degrees) > 1:
        gain = seconds[0] / seconds.min(axis=0)
        levels = [level for level in (1.05, 1.25, 1.5, 2.0, 3.0, 4.0) if gain.min() < level < gain.max()]
        if levels:
            lines = axes.contour(x, y, gain, levels=levels, colors="white", linewidths=0.9)
            axes.clabel(lines, fmt=lambda value: f"{value:g}×", fontsize=8)
    known = np.stack([_covered(view, tp, x, y) for tp in view.degrees])
    known = np.take_along_axis(known, best[None], axis=0)[0]
    if not known.all():
        axes.contourf(x, y, ~known, levels=[0.5, 1.5], colors="none", hatches=["////"])
    axes.set_xlim(requests[0], requests[-1])
    axes.set_ylim(contexts[0], contexts[-1])
    pictures.plain_log(axes.xaxis, sorted({p.batch * p.replicas for p in points} | {1}))
    pictures.plain_log(axes.yaxis, sorted({p.context for p in points}))
    pictures.labels(axes, "requests in the engine", "context, tokens of each")
    pictures.title(axes, fastest_title(view, seconds), 90)
    patches = [Patch(color=view.color(tp), alpha=0.75, label=view.name(tp)) for tp in view.degrees]
    if not known.all():
        patches.append(Patch(facecolor="white", edgecolor=pictures.FAINT, hatch="////", label="beyond its points"))
    axes.legend(handles=patches, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    pictures.footer(figure, view.label)
    return figure


def fastest_title(view: View, seconds: np.ndarray) -> str:
    """What the best layout gains; ``seconds``: of a step, ``[degree, context, requests]``."""
    base = view.name(view.degrees[0])
    gain = (seconds[0] / seconds.min(axis=0)).max()
    if gain <= 1:
        return f"{base} is fastest everywhere"
    best = seconds.argmin(axis=0)
    shares = {view.name(tp): (best == place).mean() for place, tp in enumerate(view.degrees)}
    first = max(shares, key=lambda name: shares[name])
    best_gain = f"the fastest layout is up to {gain:.2f} times as fast as {base}"
    return f"{first} is fastest on {shares[first]:.0%} of the map; {best_gain}"


def _covered(view: View, tp: int, requests: np.ndarray, context: np.ndarray) -> np.ndarray:
    batch = np.ceil(requests / view.dp(tp))
    return np.asarray(view.predictor.covers(tp, batch, batch * context))


def switch_costs(view: View) -> Figure | None:
    """Median of each part of the pause, stacked, and what was done ahead of it; a line: the median of the pause itself.

    A part is the slowest rank's, so that all together can be longer than the pause.
    """
    groups = switch_groups(view.profile.switches)
    if not groups:
        return None
    shown = list(groups.items())[:ROWS]
    figure, (axes,) = pictures.panels(1, width=9.0, height=1.2 + 0.27 * len(shown))
    phases = phases_of([sample for _, samples in shown for sample in samples])
    left = np.zeros(len(shown))
    for phase, shade in zip(phases, cycle(pictures.PARTS), strict=False):
        wide = np.array([1e3 * np.median([s.phases.get(phase, 0.0) for s in samples]) for _, samples in shown])
        axes.barh(range(len(shown)), wide, left=left, color=shade, label=phase, height=0.72)
        left += wide
    pauses = [1e3 * np.median([s.pause_seconds for s in samples]) for _, samples in shown]
    axes.plot(pauses, range(len(shown)), "|", color=pictures.LINE, ms=13, mew=2, label="the whole pause")
    ahead = np.array([1e3 * np.median([s.prepare_seconds for s in samples]) for _, samples in shown])
    if ahead.max() > 0.02 * left.max():
        style_ahead: dict[str, Any] = dict(
            facecolor="white", edgecolor=pictures.FAINT, hatch="////", linewidth=0.6, height=0.72
        )
        axes.barh(range(len(shown)), ahead, left=left, label="prepare, ahead of the pause", **style_ahead)
    names = [
        f"tp{low}→tp{high}, {requests} req, {tokens} tok" + ("" if mode == "migrate" else f", {mode}")
        for (low, high, requests, tokens, mode), _ in shown
    ]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    pictures.labels(axes, "ms", "")
    pictures.message(figure, cost_title([samples for _, samples in shown]))
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    pictures.footer(figure, view.label)
    return figure


def cost_title(groups: list[list[SwitchSample]]) -> str:
    """The range of the median pauses, and the part that takes most of all of them."""
    pauses = [1e3 * float(np.median([sample.pause_seconds for sample in samples])) for samples in groups]
    every = [sample for samples in groups for sample in samples]
    sums = {phase: sum(sample.phases.get(phase, 0.0) for sample in every) for phase in phases_of(every)}
    said = f"A switch pauses decoding for {pictures.span(pauses, '.0f' if min(pauses) >= 10 else '.1f')} ms"
    if not sum(sums.values()):
        return said
    most = max(sums, key=lambda phase: sums[phase])
    return f"{said}; the largest part is {most}, {sums[most] / sum(sums.values()):.0%} of all"


def phases_of(samples: list[SwitchSample]) -> list[str]:
    """All phases that occur, in the order of a switch."""
    found = {phase for sample in samples for phase in sample.phases}
    return [phase for phase in PHASES if phase in found] + sorted(found - set(PHASES))


def switch_groups(samples: tuple[SwitchSample, ...]) -> dict[tuple, list[SwitchSample]]:
    """Samples of the same kind: (from, to, requests, about their tokens, mode) → samples; few tokens first."""
    groups: dict[tuple, list[SwitchSample]] = {}
    for s in sorted(samples, key=lambda s: (s.from_tp, s.to_tp, s.requests, s.tokens)):
        alike = (
            key
            for key in groups
            if key[:3] == (s.from_tp, s.to_tp, s.requests) and key[4] == s.mode and s.tokens <= 1.5 * key[3]
        )
        groups.setdefault(next(alike, (s.from_tp, s.to_tp, s.requests, s.tokens, s.mode)), []).append(s)
    return groups


def predicted_against_measured(view: View, checks: list[Check]) -> Figure | None:
    """Each point as it would be predicted had it not been measured."""
    if not checks:
        return None
    figure, axes = pictures.panels(len(view.degrees), width=4.6, height=4.2)
    for one, tp in zip(axes, view.degrees, strict=True):
        mine = [check for check in checks if check.tp == tp]
        for inside, face in ((True, view.color(tp)), (False, "white")):
            some = [check for check in mine if check.inside == inside]
            what = "between points" if inside else "at an end, continued"
            error = f": {100 * np.mean([c.error for c in some]):.1f} %" if some else ""
            one.plot(
                [1e3 * c.measured for c in some], [1e3 * c.predicted for c in some], "o", ms=4.5,
                color=view.color(tp), mfc=face, label=what + error,
            )  # fmt: skip
        if mine:
            ends = [1e3 * min(c.measured for c in mine), 1e3 * max(c.measured for c in mine)]
            one.plot(ends, ends, color=pictures.LINE, linewidth=0.8)
            one.set_xscale("log")
            one.set_yscale("log")
            for axis in (one.xaxis, one.yaxis):
                pictures.plain_decades(axis)
        pictures.labels(one, "measured, ms a step", "predicted from the other points")
        pictures.title(one, view.name(tp))
        one.legend(fontsize=8, frameon=False, title="mean absolute error", title_fontsize=8)
    pictures.message(figure, error_title(checks))
    pictures.footer(figure, view.label)
    return figure


def error_title(checks: list[Check]) -> str:
    """How far off a prediction is on average, between points and at an end."""
    kinds = {"between measured points": True, "beyond them": False}
    errors = {name: [c.error for c in checks if c.inside == inside] for name, inside in kinds.items()}
    each = [f"{np.mean(found):.1%} {name}" for name, found in errors.items() if found]
    return f"A step's predicted time is off by {', '.join(each)}, on average"
