"""Pictures of a run: what was learnt, over samples and over time; how long responses were; where the time went.  One
more shows a step in which a rank was lent."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import msgspec
from matplotlib.axes import Axes

from examples.grpo.lend import Span, Timeline
from examples.grpo.train import Row, Run
from sglang_pat.tools import pictures

PARTS = {"generation": pictures.STEEL, "training": pictures.PALE_PURPLE, "weight sync": pictures.RED}
"""Parts of a step, and their colours."""


class Results(msgspec.Struct, kw_only=True):
    """Figures of a run, ``figures.json``.

    Attributes:
        before: mean reward on the held-out problems before the first step.
    """

    run: Run
    before: float
    rows: list[Row]

    @property
    def after(self) -> float:
        """Mean reward after the last test."""
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
    title = f"{merged:.0%} of the generation on merged replicas" if merged else "The layout never changed"
    pictures.set_panel_title(layouts, title, 54)
    pictures.set_figure_title(figure, make_title(results))
    return pictures.save(figure, path)


def make_title(results: Results) -> str:
    """Title that says what was learnt in what time."""
    run, rows = results.run, results.rows
    waited = sum(row.waiting > before.waiting for before, row in pairwise(rows))
    deferred = f"; prompts were deferred in {waited} of {len(rows)} steps" if waited else ""
    return (
        f"{run.task or 'Counting down'}, way {run.way}, seed {run.seed}: from {results.before:.2f} to "
        f"{results.after:.2f} on held-out problems in {rows[-1].samples} responses{deferred}"
    )


def draw_step(path: Path, results: Results) -> Path:
    """A step by rank over time: the last one in which a rank was lent, or else the last one."""
    numbered = [(number, row.timeline) for number, row in enumerate(results.rows, 1) if row.timeline]
    number, step = next((candidate for candidate in reversed(numbered) if candidate[1].lent), numbered[-1])
    figure, (axes,) = pictures.make_panels(1, width=9, height=2.8)
    names = [*(f"rank {rank}" for rank in range(len(step.generating))), "trainer"]
    for place, spans in enumerate(step.generating):
        _draw_spans(axes, place, spans, pictures.STEEL, "generates")
    if step.lent:
        _draw_spans(axes, 1, [step.lent], pictures.GRID, "lent")
    trainer = len(names) - 1
    _draw_spans(axes, trainer, step.training, pictures.PALE_PURPLE, "gradient")
    updated = max((end for _, end in step.training), default=step.over)
    _draw_spans(axes, trainer, [(updated, step.end)], pictures.RED, "update, weights into the engine")
    axes.axvline(step.over, color=pictures.LINE, linewidth=0.8, linestyle="--")
    axes.text(step.over, -0.5, "the last token ", fontsize=8, va="center", ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    pictures.set_labels(axes, f"seconds of step {number}", "")
    pictures.set_figure_title(figure, make_step_title(number, step))
    return pictures.save(figure, path)


def _draw_spans(axes: Axes, place: int, spans: list[Span], color: str, label: str) -> None:
    seen = axes.get_legend_handles_labels()[1]
    bars = [(start, end - start) for start, end in spans]
    axes.broken_barh(bars, (place - 0.35, 0.7), color=color, label=None if label in seen else label)


def make_step_title(number: int, step: Timeline) -> str:
    """Title that says how much of the training was done during the round."""
    if step.lent is None:
        return f"Step {number}, {step.end:.1f} s: no rank was lent, and all is trained after the round"
    return (
        f"Step {number}, {step.end:.1f} s: on a rank that was lent for {step.lent[1] - step.lent[0]:.1f} s, "
        f"{step.hidden:.0%} of the training was done before the last token"
    )
