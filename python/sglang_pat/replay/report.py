"""What came out, as figures and as a table."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from sglang_pat.replay.compare import regrets
from sglang_pat.replay.simulate import Run


def summary(runs: dict[str, list[Run]]) -> dict[str, dict[str, float]]:
    """Figures by policy; what ``survival`` knew nothing in (its first round) also apart."""
    result: dict[str, dict[str, float]] = {}
    for name, found in runs.items():
        regret = regrets(runs, name)
        result[name] = _figures(found, regret)
        if name == "survival" and len(found) > 1:
            result["· first round"] = _figures(found[:1], regret[:1])
            result["· later rounds"] = _figures(found[1:], regret[1:])
    return result


def _figures(runs: list[Run], regret: np.ndarray) -> dict[str, float]:
    return {
        "seconds": float(np.mean([run.seconds for run in runs])),
        "switches": float(np.mean([len(run.switches) for run in runs])),
        "most_switches": max(len(run.switches) for run in runs),
        "pause_seconds": float(np.mean([sum(switch[3] for switch in run.switches) for run in runs])),
        "regret": float(regret.mean()),
        "worst_regret": float(regret.max()),
    }


def table(runs: dict[str, list[Run]], title: str) -> Table:
    """One line a policy: means over rounds.  Regret: time beyond the oracle's, as a share of it."""
    result = Table(title=title, title_justify="left")
    for name in ("policy", "seconds", "regret", "worst", "switches", "pauses"):
        result.add_column(name, justify="left" if name == "policy" else "right")
    for name, row in summary(runs).items():
        result.add_row(
            name,
            f"{row['seconds']:.2f}",
            f"{row['regret']:+.2%}",
            f"{row['worst_regret']:+.2%}",
            f"{row['switches']:.1f} (max {row['most_switches']})",
            f"{row['pause_seconds']:.2f} s",
        )
    return result
