"""The picture of ``bench/rollout.py``: each case held against its better static layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sglang_pat.tools import pictures

ADAPTIVE = "survival"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model over one link.

    Attributes:
        link: µs:GB/s of an emulated one, or ``none``.
        static: median seconds by layout, the base layout first.
        seconds: median of ``survival``.
        rounds: of each round the better static layout's seconds over ``survival``'s.
    """

    model: str
    link: str
    requests: int
    static: dict[str, float]
    seconds: float
    rounds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, result: dict) -> Case:
        """From an entry of ``--json``."""
        runs, best = result["runs"], result["best_static"]
        rounds = zip(runs[best]["seconds"], runs[ADAPTIVE]["seconds"], strict=True)
        return cls(
            model=result["model"], link=result["link"], requests=result["work"]["batch"],
            static={name.removeprefix("static "): run["median"] for name, run in runs.items() if name != ADAPTIVE},
            seconds=runs[ADAPTIVE]["median"], rounds=[best / ours for best, ours in rounds],
        )  # fmt: skip

    @property
    def better(self) -> float:
        """Median seconds of the better static layout."""
        return min(self.static.values())

    @property
    def gain(self) -> float:
        """How many times as fast as that ``survival`` is."""
        return self.better / self.seconds

    @property
    def name(self) -> str:
        return f"{self.model}, {self.requests} requests\n{link_name(self.link)}"


def link_name(link: str) -> str:
    if link == "none":
        return "natural link"
    latency, bandwidth = link.split(":")
    return f"emulated link: {latency} µs, {bandwidth} GB/s"


def title(cases: Sequence[Case]) -> str:
    """Whether ``survival`` is ahead, and by how much."""
    gains = [case.gain for case in cases]
    ahead = sum(gain > 1 for gain in gains)
    if len(cases) == 1:
        where = "ahead" if ahead else "not ahead"
    else:
        where = {len(cases): f"ahead in all {len(cases)} cases", 0: f"ahead in none of {len(cases)} cases"}.get(
            ahead, f"ahead in {ahead} of {len(cases)} cases"
        )
    return f"{ADAPTIVE} is {pictures.span(gains)} times as fast as the better static layout: {where}"


def draw(cases: Sequence[Case], about: str, path: Path) -> Path:
    """One row a case: medians large, the rounds of ``survival`` as small dots; 1 is the better static layout."""
    figure, (axes,) = pictures.panels(1, width=11.0, height=1.7 + 0.62 * len(cases))
    layouts = list(dict.fromkeys(layout for case in cases for layout in case.static))
    shades = {layout: pictures.LAYOUT[place] for place, layout in enumerate(layouts)}
    for place, case in enumerate(cases):
        _case(axes, place, case, shades)
    axes.axvline(1, color=pictures.LINE, linewidth=1.0, zorder=1)
    low, high = axes.get_xlim()
    axes.axvspan(1, max(high, 1.02), color=pictures.OURS, alpha=0.07, linewidth=0, zorder=0)
    axes.set_xlim(low, max(high, 1.02))
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_yticks(range(len(cases)), [case.name for case in cases])
    axes.grid(axis="y", visible=False)
    pictures.labels(axes, "times as fast as the better static layout (green: ahead of it)", "")
    figure.legend(handles=_legend(shades), fontsize=8.5, frameon=False, loc="outside lower left", ncols=5)
    pictures.message(figure, title(cases))
    pictures.footer(figure, about, 0.4)
    return pictures.save(figure, path)


def _case(axes: Axes, place: int, case: Case, shades: dict[str, str]) -> None:
    """One row; at its right end the seconds."""
    axes.plot(case.rounds, [place + 0.2] * len(case.rounds), "o", color=pictures.OURS, ms=4, alpha=0.6, mew=0)
    for layout, seconds in case.static.items():
        axes.plot(case.better / seconds, place, "D", color=shades[layout], ms=7, zorder=3)
    axes.plot(case.gain, place, "o", color=pictures.OURS, ms=11, zorder=4)
    axes.annotate(
        f"{case.gain:.2f}", (case.gain, place), xytext=(0, 9), textcoords="offset points", ha="center",
        fontsize=8.5, color=pictures.OURS, fontweight="bold",
    )  # fmt: skip
    each = [f"{layout} {seconds:.1f} s" for layout, seconds in case.static.items()]
    text = f"{ADAPTIVE} {case.seconds:.1f} s\n" + ", ".join(each)
    axes.annotate(
        text, (1.01, place), xycoords=("axes fraction", "data"), fontsize=8, color=pictures.FAINT, va="center"
    )


def _legend(shades: dict[str, str]) -> list[Line2D]:
    style = dict(linestyle="none")
    layouts = [
        Line2D([], [], marker="D", markersize=7, color=shade, label=f"static {layout}", **style)
        for layout, shade in shades.items()
    ]
    ours = dict(marker="o", color=pictures.OURS, **style)
    return [
        *layouts,
        Line2D([], [], markersize=10, label=f"{ADAPTIVE}, median", **ours),
        Line2D([], [], markersize=4, alpha=0.6, label="its rounds", **ours),
    ]
