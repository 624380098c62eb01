"""What came out, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

import numpy as np
from rich.table import Table

from sglang_pat.replay.compare import Work, regrets
from sglang_pat.replay.simulate import Run

COLOURS = {1: "#4878d0", 2: "#6acc64", 4: "#ee854a", 8: "#d65f5f", 16: "#956cb4"}


def summary(runs: dict[str, list[Run]]) -> dict[str, dict[str, float]]:
    """Figures by policy; what ``survival`` knew nothing in (its first round) also apart."""
    result = {}
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


def picture(runs: dict[str, list[Run]], work: Work, title: str, path: Path) -> None:
    """Bars of the mean time; and for the last round which layout when, and how many requests were left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, (bars, lanes, load) = pyplot.subplots(
        3, 1, figsize=(9, 3 + 0.55 * len(runs)), height_ratios=[1, 0.8, 0.8], layout="constrained"
    )
    names, figures = list(runs), summary(runs)
    means = [np.mean([run.seconds for run in runs[name]]) for name in names]
    bars.barh(names, means, color=["#bbbbbb" if name == "oracle" else "#4878d0" for name in names])
    for name, seconds in zip(names, means, strict=True):
        bars.text(seconds, name, f" {seconds:.1f} s  {figures[name]['regret']:+.1%}", va="center")
    bars.set_xlim(0, max(means) * 1.2)
    bars.set_xlabel(f"seconds of generation, mean of {work.rounds} rounds, and regret against the oracle")
    bars.set_title(fill(title, 110), fontsize=9)
    bars.invert_yaxis()
    seen = set()
    for name in names:
        run = runs[name][-1]
        starts = [start for start, _, _ in run.timeline] + [run.seconds]
        for (start, tp, _), end in zip(run.timeline, starts[1:], strict=True):
            lanes.barh(name, end - start, left=start, color=COLOURS.get(tp, "#333333"))
            seen.add(tp)
        load.step(starts[:-1], [running for _, _, running in run.timeline], where="post", label=name, lw=1)
    lanes.invert_yaxis()
    patches = [Patch(color=COLOURS.get(tp, "#333333"), label=f"tp={tp}") for tp in sorted(seen)]
    lanes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1))
    lanes.set_xlabel(f"seconds, round {work.rounds}")
    load.set(yscale="log", ylabel="requests left", xlabel=f"seconds, round {work.rounds}")
    load.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    longest = max(run.seconds for run in (runs[name][-1] for name in names))
    lanes.set_xlim(0, longest)
    load.set_xlim(0, longest)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        temporary.replace(path)
    finally:
        pyplot.close(figure)
        temporary.unlink(missing_ok=True)
