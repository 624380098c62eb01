"""Runs → tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from sglang_pat.demo.records import Run

PHASES = ("prepare", "drain", "capsules", "plan", "kv", "weights", "install", "check", "abort")
"""Phases of a switch in their order; only ``prepare`` is outside of the pause."""


def _table(title: str, columns: list[str], rows: dict[str, list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def runs_table(runs: list[Run], left: int) -> Table:
    """One column a run; the tail is the time in which at most ``left`` requests were left."""
    return _table(
        "The same work, three times",
        [run.name for run in runs],
        {
            "requests": [str(len(run.answers)) for run in runs],
            "tokens": [str(run.tokens) for run in runs],
            "wall time, s": [f"{run.wall:.1f}" for run in runs],
            "tokens/s": [f"{run.tokens_per_second:.1f}" for run in runs],
            f"tail (last {left} requests), s": [f"{run.wall - run.tail_start(left):.1f}" for run in runs],
            "time per token in the tail, ms": [milliseconds(run.tail_token_time(left)) for run in runs],
            "switches": [str(len(run.switches)) for run in runs],
            "other programs, % of the cores": [f"{run.others:.0%}".rstrip("%") for run in runs],
        },
    )


def switches_table(run: Run) -> Table:
    """One column a switch. A phase counts its slowest rank, so phases may add up to more than the pause."""
    phases = [phase for phase in PHASES if any(phase in switch.phases for switch in run.switches)]
    phases += sorted({phase for switch in run.switches for phase in switch.phases} - set(PHASES))
    rows = {"at, s": [f"{switch.at:.2f}" for switch in run.switches]}
    for phase in phases:
        name = "prepare (no pause), ms" if phase == "prepare" else f"{phase}, ms"
        rows[name] = [milliseconds(switch.phases.get(phase)) for switch in run.switches]
    rows |= {
        "pause, ms": [milliseconds(switch.pause) for switch in run.switches],
        "longest wait for a token, ms": [milliseconds(switch.felt or None) for switch in run.switches],
        "requests moved": [str(switch.requests) for switch in run.switches],
        "of these recomputed": [str(switch.recomputed) for switch in run.switches],
        "KV tokens moved": [str(switch.tokens) for switch in run.switches],
        "sent between ranks": [size(switch.moved_bytes) for switch in run.switches],
    }
    if any(switch.error for switch in run.switches):
        rows["aborted"] = [switch.error for switch in run.switches]
    columns = [f"{switch.before} → {switch.after}" for switch in run.switches]
    return _table(f"Switches of the {run.name} engine", columns, rows)


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def size(count: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
