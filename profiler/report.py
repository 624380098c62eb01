"""Draw a profile.

    python -m profiler.report profile.json --out DIR

Writes ``index.html``, one page with one picture inside: the latency curves of the layouts with the measured points.  If
DIR has a ``validation.json`` of ``profiler.validate``, the picture shows the check between the layouts, too.
"""

from __future__ import annotations

import base64
import html
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

import msgspec
import numpy as np

from profiler.validate import VALIDATION, LayoutComparison, Validation
from sglang_pat import files
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import DecodePoint, Profile, describe_thinness, load
from sglang_pat.tools.commands import Parser, UsageError, check_output_folder, run


def main(argv: list[str] | None = None) -> int:
    """Returns 0; raises UsageError or ProfileError for bad input, before anything is written."""
    parser = Parser(prog="python -m profiler.report", description="One page that shows a profile.")
    parser.add_argument("profile", type=Path, metavar="profile.json")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="made if it is not there")
    args = parser.parse_args(argv)
    profile = load(args.profile)
    ranks = profile.fingerprint.num_ranks
    if not any(point.replicas == ranks // point.tp for point in profile.decode):
        raise UsageError(f"{args.profile} has no decode times yet; run the same profiler.sweep again to go on")
    path = check_output_folder(args.out) / "index.html"
    files.write(format_page(profile, read_validation(args.out)).encode(), path)
    print(path)
    return 0


def read_validation(folder: Path) -> LayoutComparison | None:
    """What ``profiler.validate`` left in ``folder``.

    Raises:
        UsageError: something else left it.
    """
    path = folder / VALIDATION
    if not path.exists():
        return None
    try:
        return files.decode(files.read(path), Validation).between
    except ValueError as error:
        raise UsageError(f"{path}: {error}; run profiler.validate again, or remove it") from None


STYLE = Template("""
body { font: 15px/1.5 system-ui, sans-serif; color: $line; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
img { max-width: 100%; } table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: left;
border-bottom: 1px solid $grid; font-size: 0.9em; vertical-align: top; }
""")


def format_page(profile: Profile, between: LayoutComparison | None) -> str:
    """The page, whole."""
    from sglang_pat.tools import pictures  # late: a bad command line is told at once

    mark = profile.fingerprint
    switches = sorted(profile.switches, key=_get_kind)
    groups = [(kind, list(samples)) for kind, samples in groupby(switches, key=_get_kind)]
    pauses = [
        (
            f"tp{low} → tp{high}", requests, int(median(s.tokens for s in samples)), mode, len(samples),
            f"{1e3 * median(s.pause_seconds for s in samples):.1f}",
        )
        for (low, high, requests, _, mode), samples in groups
    ]  # fmt: skip
    shown = base64.b64encode(draw_picture(profile, between)).decode()
    sections = [
        f"<h1>Profile of {html.escape(mark.model)}</h1>",
        f"<p><b>This is {thin}.</b></p>" if (thin := describe_thinness(profile)) else "",
        "" if profile.complete else "<p><b>An interrupted sweep: some points are missing.</b></p>",
        f'<img alt="step times" src="data:image/png;base64,{shown}">',
        "<p>Dots are measured, lines predicted: requests are spread evenly over the replicas of each layout. Hollow "
        "dots: one replica at work alone.</p>",
        f"<p>{html.escape(str(between))}</p>" if between else "",
        "<h2>What a switch costs</h2>",
        _format_table(("switch", "requests", "KV tokens", "KV", "samples", "pause, ms"), pauses),
        "<h2>What it holds for</h2>" + _format_table(("", ""), msgspec.structs.asdict(mark).items()),
        "<h2>How it was made</h2>" + _format_table(("", ""), [*profile.machine.items(), *profile.grid.items()]),
        "".join(f"<p>{html.escape(source)}</p>" for source in profile.sources),
    ]
    style = STYLE.substitute(line=pictures.LINE, grid=pictures.GRID)
    head = f'<meta charset="utf-8"><title>Profile</title><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head><body>" + "\n".join(sections) + "</body></html>\n"


def _get_kind(sample: Any) -> tuple[int, int, int, int, str]:
    """Switches of a kind have about as many tokens: the same power of two."""
    return sample.from_tp, sample.to_tp, sample.requests, sample.tokens.bit_length(), sample.mode


def _format_table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    cells = [[f"<th>{html.escape(name)}</th>" for name in columns]]
    cells += [[f"<td>{html.escape(str(value))}</td>" for value in row] for row in rows]
    return "<table>" + "".join(f"<tr>{''.join(row)}</tr>" for row in cells) + "</table>"


def draw_picture(profile: Profile, between: LayoutComparison | None) -> bytes:
    """PNG: time of a step over the requests in the engine, one line a layout, at a short and at a long context (PAT
    Fig. 4); and the check between layouts, if there was one."""
    from sglang_pat.tools import pictures

    mark, predictor = profile.fingerprint, Predictor(profile)
    ranks = mark.num_ranks
    points = {tp: [p for p in profile.decode if (p.tp, p.replicas) == (tp, ranks // tp)] for tp in predictor.degrees}
    degrees = [tp for tp in predictor.degrees if points[tp]]
    contexts = _choose_contexts([point for tp in degrees for point in points[tp]])
    figure, axes = pictures.make_panels(len(contexts) + (between is not None), width=4.8)
    for one, context in zip(axes, contexts, strict=False):
        most = {}
        for tp in degrees:
            dp, color = ranks // tp, pictures.choose_color(degrees, tp)
            near = [p for p in points[tp] if _is_near(p, context)]
            most[tp] = max((p.batch for p in near), default=1) * dp
            line = np.unique(np.geomspace(1, most[tp], 200).round())
            seconds = step_seconds(predictor, tp, line, context)
            one.plot(line, 1e3 * seconds, color=color, label=pictures.format_layout(ranks, tp), linewidth=1.8)
            one.plot([p.batch * dp for p in near], [1e3 * p.seconds for p in near], "o", color=color, ms=4)
            lone = [p for p in profile.decode if (p.tp, p.replicas, p.batch) == (tp, 1, 1) and _is_near(p, context)]
            if dp > 1:
                one.plot([1] * len(lone), [1e3 * p.seconds for p in lone], "o", color=color, ms=4, mfc="white")
        one.set_xscale("log", base=2)
        pictures.set_log_axis(one.xaxis, [2**power for power in range(max(most.values()).bit_length())])
        one.set_ylim(bottom=0)
        pictures.set_labels(one, "requests in the engine", "ms a step")
        pictures.set_panel_title(
            one, f"{context} tokens: {find_fastest(predictor, degrees, context, min(most.values()))}", 50
        )
        one.legend(fontsize=8.5, frameon=False)
    if between is not None:
        off = {name: 100 * value for name, value in between.beside.items()}
        colors = [pictures.LAYOUT[place % len(pictures.LAYOUT)] for place in range(len(off))]
        axes[-1].bar(list(off), list(off.values()), yerr=100 * between.noise, color=colors, width=0.5)
        axes[-1].axhline(0, color=pictures.LINE, linewidth=0.8)
        pictures.set_labels(axes[-1], "", "% slower than predicted, beside the others")
        pictures.set_panel_title(
            axes[-1],
            f"Check between layouts: off by {between.error:.1%}, the machine's noise is {between.noise:.1%}",
            50,
        )
    link = "" if mark.link == "none" else f", emulated link {mark.link}"
    pictures.set_footer(figure, f"{profile.kind}: {mark.model}, {mark.dtype}, {ranks} × {mark.device}{link}")
    return pictures.render_figure(figure)


def step_seconds(predictor: Predictor, tp: int, requests: np.ndarray, context: int) -> np.ndarray:
    """Predicted seconds of a step with ``requests`` requests in the engine, spread evenly: the fullest replica."""
    dp = predictor.num_ranks // tp
    batch = np.ceil(requests / dp)
    return np.asarray(predictor.step_seconds(tp, batch, batch * context, np.minimum(dp, requests)))


def find_fastest(predictor: Predictor, degrees: list[int], context: int, most: int) -> str:
    """Which layout has the shortest step, from one request to ``most``."""
    requests = np.unique(np.geomspace(1, most, 4096).round())
    best = np.stack([step_seconds(predictor, tp, requests, context) for tp in degrees]).argmin(axis=0)
    starts = [0, *(np.flatnonzero(np.diff(best)) + 1)]
    names = [f"tp{degrees[best[start]]}" for start in starts]
    if len(starts) == 1:
        return f"{names[0]} is fastest"
    if len(starts) > 4:
        return f"{names[0]} is fastest for one request, {names[-1]} for {most}; they change places in between"
    until = [f"{name} up to {requests[end - 1]:.0f}" for name, end in zip(names, starts[1:], strict=False)]
    return f"fastest are {', '.join(until)}, {names[-1]} with more requests"


def _choose_contexts(points: list[DecodePoint]) -> list[int]:
    """Two contexts at which much was measured: the shortest, and the longest with at least half as many points."""
    counts = Counter(next((c for c in (p.context for p in points) if _is_near(p, c)), p.context) for p in points)
    many = sorted(context for context, count in counts.items() if 2 * count >= max(counts.values()))
    return many if len(many) == 1 else [many[0], many[-1]]


def _is_near(point: DecodePoint, context: int) -> bool:
    """Whether the two are the same context but for some tokens."""
    return abs(point.context - context) <= max(16, 0.1 * context)


if __name__ == "__main__":
    sys.exit(run("profiler.report", main))
