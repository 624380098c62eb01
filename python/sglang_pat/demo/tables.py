"""Results → tables for the terminal."""

from __future__ import annotations

import statistics

from rich.table import Table

from sglang_pat.demo.records import Result


def table(result: Result) -> Table:
    """One row a contender."""
    made = Table(title=f"{result.model}, {result.link_name}", title_justify="left", title_style="bold", box=None)
    made.add_column("", no_wrap=True)
    for name in ("seconds, median", "rounds", "speed over the better static", "other programs", "switches"):
        made.add_column(name, justify="right")
    for at, contender in enumerate(result.contenders):
        runs = [round_[at] for round_ in result.rounds]
        switches = [sum(bool(switch.requests) for switch in run.switches) for run in runs]
        made.add_row(
            contender,
            f"{result.median(contender):.1f}",
            " ".join(f"{seconds:.1f}" for seconds in result.seconds(contender)),
            f"×{statistics.median(result.gains(contender)):.2f}",
            f"{max(run.others for run in runs):.0%} of the cores",
            " ".join(map(str, switches)),
        )
    return made
