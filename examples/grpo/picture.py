"""The picture of a run: what was learnt, over samples and over time; how long responses were; where the time went."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import msgspec

from examples.grpo.train import Row, Run
from sglang_pat.tools import pictures

PARTS = {"generation": pictures.STEEL, "training": pictures.PALE_PURPLE, "weight sync": pictures.RED}
"""Of a step, and their colours."""


class Results(msgspec.Struct, kw_only=True):
    """``figures.json``.

    Attributes:
        before: mean reward on the held-out problems before the first step.
    """

    run: Run
    before: float
    rows: list[Row]

    @property
    def after(self) -> float:
        """After the last test."""
        return next((row.held_out for row in reversed(self.rows) if row.held_out is not None), self.before)

    def list_tests(self) -> list[tuple[int, float, float]]:
        """(samples, seconds, mean reward on the held-out problems) of each test."""
        tests = [(row.samples, row.seconds, row.held_out) for row in self.rows if row.held_out is not None]
        return [(0, 0.0, self.before), *tests]


def draw(path: Path, results: Results) -> Path:
    """Write the picture to ``path``."""
    rows, steps = results.rows, list(range(1, len(results.rows) + 1))
    figure, (samples, time, lengths, parts, layouts) = pictures.make_panels(5)
    tests = results.list_tests()
    axis = [row.samples for row in rows], [row.seconds / 60 for row in rows]
    for axes, x, tested, label in (
        (samples, axis[0], [test[0] for test in tests], "responses trained"),
        (time, axis[1], [test[1] / 60 for test in tests], "minutes"),
    ):
        axes.plot(x, [row.reward for row in rows], color=pictures.STEEL, linewidth=1, label="of the step")
        axes.plot(tested, [test[2] for test in tests], color=pictures.LINE, marker="o", markersize=4, label="held out")
        axes.set_ylim(bottom=0)
        pictures.set_labels(axes, label, "mean reward")
    samples.legend(fontsize=8, frameon=False)
    gained = f"{results.after / results.before:.1f} times the reward" if results.before else "no reward at first"
    pictures.set_panel_title(samples, f"Held-out problems: {gained}", 54)
    pictures.set_panel_title(time, f"{rows[-1].seconds / 60:.1f} minutes without the tests", 54)

    for name, value, color in (
        ("longest", max, pictures.ORANGE), ("mean", mean, pictures.LINE), ("median", median, pictures.STEEL)
    ):  # fmt: skip
        lengths.plot(steps, [value(row.lengths) for row in rows], color=color, linewidth=1.2, label=name)
    lengths.legend(fontsize=8, frameon=False)
    pictures.set_labels(lengths, "step", "tokens of a response")
    ratio = mean(max(row.lengths) / median(row.lengths) for row in rows)
    pictures.set_panel_title(lengths, f"The longest response is {ratio:.0f} times the median", 54)

    bottom = [0.0] * len(rows)
    for part, color in PARTS.items():
        values = [row.parts.get(part, 0.0) for row in rows]
        parts.bar(steps, values, bottom=bottom, width=1.0, color=color, label=part)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    parts.legend(fontsize=8, loc="upper right", edgecolor=pictures.GRID)
    pictures.set_labels(parts, "step", "seconds")
    share = sum(row.parts["generation"] for row in rows) / sum(bottom)
    pictures.set_panel_title(parts, f"{share:.0%} of the time generates", 54)

    degrees = sorted({tp for row in rows for tp, seconds in row.degrees.items() if seconds})
    bottom = [0.0] * len(rows)
    for tp in degrees:
        values = [row.degrees.get(tp, 0.0) for row in rows]
        color = pictures.choose_color(degrees, tp)
        layouts.bar(steps, values, bottom=bottom, width=1.0, color=color, label=pictures.format_layout(2, tp))
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    layouts.legend(fontsize=8, loc="upper right", edgecolor=pictures.GRID)
    pictures.set_labels(layouts, "step", "seconds with requests")
    merged = sum(row.degrees.get(2, 0.0) for row in rows) / max(sum(bottom), 1e-9)
    said = f"{merged:.0%} of the generation on merged replicas" if merged else "The layout never changed"
    pictures.set_panel_title(layouts, said, 54)
    pictures.set_figure_title(figure, make_title(results))
    return pictures.save(figure, path)


def make_title(results: Results) -> str:
    """What was learnt in what time."""
    run, rows = results.run, results.rows
    waited = sum(row.waiting > before.waiting for before, row in pairwise(rows))
    deferred = f"; prompts were deferred in {waited} of {len(rows)} steps" if waited else ""
    return (
        f"{run.task or 'Counting down'}, way {run.way}, seed {run.seed}: from {results.before:.2f} to "
        f"{results.after:.2f} on held-out problems in {rows[-1].samples} responses{deferred}"
    )
