"""One HTML page with everything in it: figures, tables, what the profile is of."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from profiler.figures import View
from profiler.maps import phases_of, switch_groups
from sglang_pat.tools import pictures

STYLE = Template("""
body { font: 15px/1.5 system-ui, sans-serif; color: $line; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0.1em; } h2 { font-size: 1.15em; margin-top: 2.2em; }
img { max-width: 100%; } .faint { color: $faint; font-size: 0.9em; } .warn { color: $red; }
table { border-collapse: collapse; margin: 0.7em 0; } td, th { padding: 2px 12px 2px 0; text-align: left;
border-bottom: 1px solid $grid; font-size: 0.9em; vertical-align: top; } td.n, th.n { text-align: right; }
""").substitute(line=pictures.LINE, faint=pictures.FAINT, red=pictures.RED, grid=pictures.GRID)


def build(
    view: View, figures: Sequence[tuple[str, str, Path]], accuracy: list[dict], extra: Sequence[dict] = ()
) -> str:
    """The page.

    Args:
        figures: heading, text and file of each.
        accuracy: rows of :func:`profiler.accuracy.summary`.
        extra: rows of a validation, if there is one.
    """
    profile = view.profile
    warn = "" if profile.complete else '<p class="warn">An interrupted sweep: some points are missing.</p>'
    parts = [
        f"<h1>Profile of {html.escape(profile.fingerprint.model)}</h1>",
        f'<p class="faint">{html.escape(view.label)}; {len(profile.decode)} decode points, {len(profile.prefill)} '
        f"prefill points, {len(profile.switches)} switches</p>{warn}",
    ]
    for heading, text, path in figures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f"<h2>{html.escape(heading)}</h2><p>{html.escape(text)}</p>")
        parts.append(f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{data}">')
        if path.stem == "accuracy":
            columns = ["layout", "points", "interpolated", "continued", "spread of windows"]
            parts.append(table(columns, _errors(accuracy)))
        if path.stem == "switch":
            parts.append(_switch_table(view))
    if extra:
        parts.append("<h2>Validation against real decoding</h2>")
        parts.append(table(list(extra[0]), [[_shown(value) for value in row.values()] for row in extra]))
    parts.append("<h2>What it holds for</h2>")
    parts.append(table(["fingerprint", ""], msgspec.structs.asdict(profile.fingerprint).items()))
    if profile.setup:
        columns = list(profile.setup[0].__struct_fields__)
        parts.append("<h2>One-time work at start, seconds</h2>")
        parts.append(table(columns, [[_shown(getattr(row, c)) for c in columns] for row in profile.setup]))
    rows = [*profile.machine.items(), *((f"grid: {name}", axis) for name, axis in profile.grid.items())]
    parts.append("<h2>How it was made</h2>" + table(["", ""], rows))
    if profile.sources:
        parts.append("<h2>Sources</h2><ul>" + "".join(f"<li>{html.escape(s)}</li>" for s in profile.sources) + "</ul>")
    head = f'<meta charset="utf-8"><title>Profile</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>" + "\n".join(parts) + "</body></html>\n"


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """An HTML table; numbers to the right."""
    body = [[_shown(cell) for cell in row] for row in rows]
    right = [all(_is_number(row[i]) for row in body) and bool(body) for i in range(len(columns))]
    lines = [_row("th", columns, right), *(_row("td", row, right) for row in body)]
    return "<table>" + "".join(lines) + "</table>"


def _row(tag: str, texts: Sequence[str], right: list[bool]) -> str:
    return "<tr>" + "".join(_cell(tag, text, r) for text, r in zip(texts, right, strict=True)) + "</tr>"


def _cell(tag: str, text: str, right: bool) -> str:
    return f"<{tag}{' class=n' if right else ''}>{html.escape(text)}</{tag}>"


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip(" %").replace(",", ""))
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)


def percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.2f} %"


def _errors(rows: list[dict]) -> list[list[str]]:
    return [
        [row["layout"], str(row["points"]), *(percent(row[name]) for name in ("interpolated", "continued", "spread"))]
        for row in rows
    ]


def _switch_table(view: View) -> str:
    groups = switch_groups(view.profile.switches)
    phases = phases_of(list(view.profile.switches))
    rows = []
    for (low, high, requests, _, mode), samples in groups.items():
        middle = sorted(samples, key=lambda s: s.pause_seconds)[len(samples) // 2]
        rows.append(
            [f"tp{low} → tp{high}", requests, middle.tokens, mode, f"{middle.moved_bytes / 1e6:.1f}", len(samples)]
            + [f"{1e3 * seconds:.1f}" for seconds in (middle.pause_seconds, middle.prepare_seconds)]
            + [f"{1e3 * middle.phases.get(phase, 0.0):.1f}" for phase in phases]
        )
    columns = ["switch", "requests", "KV tokens", "KV", "MB moved", "samples", "pause ms", "prepare ms", *phases]
    return table(columns, rows)
