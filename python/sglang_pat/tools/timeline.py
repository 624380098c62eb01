"""The picture of a step, from a decision log: requests in the engine over time, by layout, and how often drafts were
right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.patches import Patch

from sglang_pat.figures import Figures
from sglang_pat.policies.snapshot import Snapshot
from sglang_pat.tools import pictures

MOST_CHANGES = 3
"""Changes of the layout that the title lists."""


def draw(seen: Sequence[Snapshot], figures: Figures | None, path: Path) -> Path:
    """Draw a step.

    Args:
        seen: what the policy was shown, in the order of time.
        figures: what the log says of the step; None if it has not ended.

    Raises:
        ValueError: there was no request in it, or no picture has such a name.
    """
    busy = [number for number, one in enumerate(seen) if one.requests]
    if not busy:
        raise ValueError("no request in its last step: there is nothing to draw")
    seen = seen[busy[0] : busy[-1] + 2]
    drafts = any(one.chances for one in seen)
    figure, (axes, *below) = pictures.make_panels(1 + drafts, width=8, height=3.6, columns=1)
    _draw_requests(axes, seen)
    for one in below:
        _draw_chances(one, seen)
    pictures.set_labels([axes, *below][-1], "seconds", [axes, *below][-1].get_ylabel())
    pictures.set_figure_title(figure, _format_message(seen))
    if figures:
        pictures.set_footer(figure, figures.format_line())
    return pictures.save(figure, path)


def _format_message(seen: Sequence[Snapshot]) -> str:
    names = [pictures.format_layout(one.num_ranks, one.tp) for one in seen]
    changes = [number for number in range(1, len(seen)) if names[number] != names[number - 1]]
    then = [f"then {names[number]} with {seen[number].requests} left" for number in changes]
    if len(then) > MOST_CHANGES:
        then = [f"then {len(then)} changes, {names[-1]} at last"]
    most, seconds = max(one.requests for one in seen), seen[-1].now - seen[0].now
    return f"{most} requests in {seconds:.1f} s: " + ", ".join([f"begins in {names[0]}", *then])


def _draw_requests(axes: pictures.Axes, seen: Sequence[Snapshot]) -> None:
    degrees = sorted({tp for one in seen for tp in one.degrees})
    for before, after in pairwise(seen):
        span = [before.now - seen[0].now, after.now - seen[0].now]
        axes.fill_between(span, [before.requests] * 2, color=pictures.choose_color(degrees, before.tp), linewidth=0)
    in_force = sorted({one.tp for one in seen})
    colors = [pictures.choose_color(degrees, tp) for tp in in_force]
    axes.legend([Patch(color=color) for color in colors], [f"tp{tp}" for tp in in_force], frameon=False)
    axes.set_ylim(bottom=0)
    pictures.set_labels(axes, "", "requests in the engine")


def _draw_chances(axes: pictures.Axes, seen: Sequence[Snapshot]) -> None:
    """How likely the first, second, fourth, … draft of a request is right, with those before it."""
    for number, place in enumerate((1, 2, 4, 8)):
        points = [(one.now - seen[0].now, one.chances[place - 1]) for one in seen if len(one.chances) >= place]
        if points:
            axes.step(*zip(*points, strict=True), where="post", color=pictures.SERIES[number], label=f"draft {place}")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    pictures.set_labels(axes, "", "chance to be right")
