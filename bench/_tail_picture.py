"""The picture of ``bench/tail_batching.py``: simulated rounds and real ones, and what to over-provision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sglang_pat.tools import pictures

BASE, ADAPTIVE, TAIL, BOTH = "without", "adaptive TP", "tail batching", "both"
WAYS = {BASE: pictures.LIGHT, ADAPTIVE: pictures.OURS, TAIL: pictures.PURPLE, BOTH: pictures.LINE}
MORE = {"prompts": pictures.PALE_PURPLE, "responses": pictures.BROWN, "both": pictures.PURPLE}
"""What more is started of."""
MIDDLE = 0.5
"""ρ of the bars."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is drawn; parts may be empty.

    Attributes:
        node: simulated seconds of a round by way, by (setting, ρ).
        more: simulated gain of a rollout by η, by (what more is started of, ρ); ``middle``: the setting it is of.
        real: by model, seconds of a round by way: the mean, and of each round if known.
    """

    node: dict[tuple[str, float], dict[str, float]] = field(default_factory=dict)
    more: dict[tuple[str, float], dict[float, float]] = field(default_factory=dict)
    middle: str = ""
    real: dict[str, dict[str, tuple[float, list[float]]]] = field(default_factory=dict)
    machine: str = ""
    """That made the real rounds."""
    source: str = ""
    """Where the figures are from, if not from this run."""

    @property
    def gains(self) -> list[float]:
        """Of tail batching and adaptive TP together."""
        return [seconds[BASE] / seconds[BOTH] for seconds in self.node.values()]


NODE = {
    "base on a node": BASE, "base on a node, adaptive": ADAPTIVE, "strict on a node": TAIL,
    "strict on a node, adaptive": BOTH,
}  # fmt: skip
REAL = {"without": BASE, "tail batching": TAIL, "tail batching, adaptive": BOTH}
"""Names in the file of results."""


def of(written: dict) -> Found:
    """From what ``--json`` writes."""
    keys = {tuple(key.split(" / ")): value["seconds"] for key, value in written.get("replay", {}).items()}
    node: dict[tuple[str, float], dict[str, float]] = {}
    for (name, setting, rho), seconds in keys.items():
        if name in NODE:
            node.setdefault((setting, float(rho)), {})[NODE[name]] = seconds
    settings = list(dict.fromkeys(setting for setting, _ in node))
    middle = settings[min(1, len(settings) - 1)] if settings else ""
    more: dict[tuple[str, float], dict[float, float]] = {}
    for (name, eta, rho), seconds in keys.items():
        if name in MORE:
            more.setdefault((name, float(rho)), {})[float(eta)] = keys["base", middle, rho] / seconds
    real = {}
    for model, contenders in written.get("real", {}).get("models", {}).items():
        rounds = {REAL[name]: [one["seconds"] for one in made] for name, made in contenders.items()}
        real[model] = {way: (mean(each), each) for way, each in rounds.items()}
    machine = written.get("real", {}).get("machine")
    return Found(
        node=node, more=more, middle=middle, real=real,
        machine=f"{machine['cpu']}, {machine['cores']} cores" if machine else "",
    )  # fmt: skip


def title(found: Found) -> str:
    """What both together gain in simulation, and what tail batching gains in real rounds."""
    said = []
    if found.node:
        gains = pictures.span(found.gains, ".1f")
        said.append(f"Simulated, a round is {gains} times as fast with tail batching and adaptive TP")
    if found.real:
        gains = ", ".join(_gain(seconds, model) for model, seconds in found.real.items())
        said.append(f"{'with' if said else 'With'} tail batching alone, real rounds of {gains}")
    return "; ".join(said)


def _gain(seconds: dict[str, tuple[float, list[float]]], model: str) -> str:
    (base, _), (tail, _) = seconds[BASE], seconds[TAIL]
    return f"{model} are {base / tail:.2f} times as fast"


def best(found: Found, rho: float) -> str:
    """Title of one panel: what it is best to start more of."""
    gain, eta, what = max(
        (gain, eta, what) for (what, of), gains in found.more.items() if of == rho for eta, gain in gains.items()
    )
    more = "of both" if what == "both" else what
    return f"ρ = {rho:g}: best to start more {more}, {gain:.2f} times as fast (η = {eta:g})"


def draw(found: Found, path: Path) -> Path:
    """Above, seconds of a round: simulated and real; below, simulated gains by η, a panel for each ρ."""
    figure, axes = _mosaic(found)
    if found.node:
        _node(axes["node"], found)
    for model in found.real:
        _real(axes[model], found, model)
    correlations = sorted({rho for _, rho in found.more})
    most = max((gain for gains in found.more.values() for gain in gains.values()), default=1.0)
    for rho in correlations:
        _more(axes[f"{rho}"], found, rho, most)
    if correlations:
        axes[f"{correlations[0]}"].legend(fontsize=8.5, frameon=False, title="more of", title_fontsize=8.5)
    pictures.message(figure, title(found))
    simulated = "Simulated: modelled profiles, RollPacker's settings, upper row η = 1.25." if found.node else ""
    real = f"Real: {found.machine}." if found.real else ""
    pictures.footer(figure, " ".join(filter(None, (simulated, real, found.source))))
    return pictures.save(figure, path)


def _mosaic(found: Found) -> tuple[Figure, dict[str, Axes]]:
    """Panels by name, as many as there are parts."""
    upper = (["node", "node"] if found.node else []) + list(found.real)
    lower = [f"{rho}" for rho in sorted({rho for _, rho in found.more})]
    rows = [_spread(names) for names in (upper, lower) if names]
    figure, axes = pictures.plt.subplot_mosaic(
        rows, figsize=(12.5, 4.0 * len(rows)), layout="constrained", gridspec_kw={"hspace": 0.06}
    )
    for one in axes.values():
        pictures.tidy(one)
    return figure, axes


def _spread(names: list[str], columns: int = 12) -> list[str]:
    """Each name so many times that they fill the columns; one to four names."""
    return [name for name in names for _ in range(columns // len(names))]


def _node(axes: Axes, found: Found) -> None:
    """Bars: seconds at the middle ρ as a share of those without; short lines: the other ρ."""
    settings = list(dict.fromkeys(setting for setting, _ in found.node))
    for place, setting in enumerate(settings):
        by_rho = {rho: seconds for (name, rho), seconds in found.node.items() if name == setting}
        middle = by_rho.get(MIDDLE, next(iter(by_rho.values())))
        for number, way in enumerate(NODE.values()):
            at = place + 0.2 * (number - 1.5)
            height = middle[way] / middle[BASE]
            axes.bar(at, height, 0.18, color=WAYS[way])
            others = [seconds[way] / seconds[BASE] for seconds in by_rho.values()]
            if way != BASE:
                axes.vlines(at, min(others), max(others), color=pictures.FAINT, linewidth=1.2)
            text = f"{middle[way]:.0f} s"
            axes.text(at, max(height, *others) + 0.015, text, ha="center", fontsize=8, color=pictures.LINE)
    axes.set_xticks(range(len(settings)), [f"{name} tokens" for name in settings])
    axes.set_ylim(0, 1.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="x", visible=False)
    pictures.labels(axes, "", "seconds a round, of those without")
    pictures.title(axes, f"Simulated, a node's share of the batch; ρ = {MIDDLE}, lines: {_extent(found)}", 64)
    handles = [Patch(color=WAYS[way], label=way) for way in NODE.values()]
    axes.legend(handles=handles, fontsize=8.5, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _extent(found: Found) -> str:
    return pictures.span((rho for _, rho in found.node), "g")


def _real(axes: Axes, found: Found, model: str) -> None:
    """Bars: mean seconds of a round; dots: each round."""
    ways = found.real[model]
    for place, (way, (seconds, rounds)) in enumerate(ways.items()):
        axes.bar(place, seconds, 0.6, color=WAYS[way])
        axes.plot([place] * len(rounds), rounds, "o", color=pictures.FAINT, ms=3.5, mew=0)
        axes.text(place, max([seconds, *rounds]), f"{seconds:.1f} s", ha="center", va="bottom", fontsize=8.5)
    axes.set_xticks(range(len(ways)), list(map(_two_lines, ways)))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.1)
    pictures.labels(axes, "", "seconds a round, mean")
    pictures.title(axes, f"Real rounds of {model}", 32)


def _two_lines(way: str) -> str:
    return "tail batching and\nadaptive TP" if way == BOTH else way.replace(" ", "\n")


def _more(axes: Axes, found: Found, rho: float, most: float) -> None:
    """Gain of the rollout by η, a line for each thing of which more is started."""
    for what, shade in MORE.items():
        points: Iterable[tuple[float, float]] = [(1.0, 1.0), *sorted(found.more.get((what, rho), {}).items())]
        axes.plot(*zip(*points, strict=True), "o-", color=shade, ms=4, linewidth=1.8, label=what)
    axes.set_ylim(0, 1.08 * most)
    pictures.labels(axes, f"η: times as many started ({found.middle}, simulated)", "rollout, times as fast")
    pictures.title(axes, best(found, rho), 40)
