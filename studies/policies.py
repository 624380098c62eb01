"""Policies on simulated batches: the study over length shapes, correlations, batch sizes and profiles.

    python -m studies.policies [--quick] [--json FILE] [--image FILE] [--jobs N] [--profiles FILE ...]
    python -m studies.policies --wrong 0.2 --seeds 5 [--errors KIND ...] [the same]

For every cell (profile × shape × ρ × batch) some rounds are drawn and generated under every static layout, ``pat``,
``survival`` and the oracle (``python -m studies.compare`` does one cell). Simulated, so that the machine does not
matter; the same seeds give the same figures.  Cells whose KV would not fit the profile's pool are left out and counted.
With ``--wrong`` the policies' profiles are off by this share, see ``wrong_profiles.py``; 0 for the right ones.
Policies are calibrated, as an engine is before its first request.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.predict.profile import load
from sglang_pat.tools.commands import Parser, run
from studies import PROFILES, pat_settings, wrong_profiles
from studies.compare import KNOWN, ProfiledMachine, Workload, compare, compute_regrets
from studies.shapes import NAMED, parse_shape
from studies.simulate import describe_queueing

ROOT = Path(__file__).resolve().parents[1]
CORRELATIONS = (0.0, 0.5, 0.8)
BATCHES = (16, 32, 64, 128, 256, 512)
SPACING = 32
"""Token steps between two questions at least: a policy is asked some hundred times a batch."""

REGRET_GOAL = 0.5
"""Most that ``survival``'s mean regret may be of ``pat``'s."""

STATIC_GOAL = 0.98
"""Least ratio of the best static layout's time to ``survival``'s."""


@dataclass(frozen=True)
class PolicyCell:
    """Figures of one cell: mean regrets, times as the best static layout's over the policy's, switches in a round.

    Policies wait for more requests in the first two rounds; after them they know how many come.  ``…_decided``: regrets
    when they know it from the first on; what is left is the quality of the decisions.
    """

    profile: str
    shape: str
    rho: float
    batch: int
    seconds: float
    pat_regret: float
    survival_regret: float
    pat_decided: float
    survival_decided: float
    first_regret: float
    static_over_pat: float
    static_over_survival: float
    static_over_oracle: float
    most_switches: int
    pat_most_switches: int


@cache
def make_machine(path: str) -> ProfiledMachine:
    return ProfiledMachine(load(path, complete=True))


def study(task: tuple[str, str, float, int, int, int]) -> PolicyCell | None:
    """One cell; None if its batch does not fit."""
    path, shape, rho, batch, rounds, seed = task
    on = make_machine(path)
    workload = Workload(shape=parse_shape(shape), batch=batch, rounds=rounds, correlation=rho, seed=seed)
    if any(describe_queueing(on.profile.fingerprint, drawn) for drawn in workload.make_batches()):
        return None
    statics = [f"static:{tp}" for tp in on.profile.fingerprint.degrees]
    names = ["pat", "survival", "pat" + KNOWN, "survival" + KNOWN, *statics]
    noise = {"noise": wrong_profiles.NOISE, "calibration": wrong_profiles.CALIBRATION_NOISE}
    runs = compare(on, workload, names, SPACING, **noise)
    mean = {name: np.mean([run.seconds for run in found]) for name, found in runs.items()}
    best = min(mean[name] for name in statics)
    regret = {name: compute_regrets(runs, name) for name in ("pat", "survival", "pat" + KNOWN, "survival" + KNOWN)}
    most = {name: max(len(run.switches) for run in runs[name]) for name in ("pat", "survival")}
    return PolicyCell(
        profile=Path(path).stem,
        shape=shape,
        rho=rho,
        batch=batch,
        seconds=float(mean["oracle"]),
        pat_regret=float(regret["pat"].mean()),
        survival_regret=float(regret["survival"].mean()),
        pat_decided=float(regret["pat" + KNOWN].mean()),
        survival_decided=float(regret["survival" + KNOWN].mean()),
        first_regret=float(regret["survival"][0]),
        static_over_pat=float(best / mean["pat"]),
        static_over_survival=float(best / mean["survival"]),
        static_over_oracle=float(best / mean["oracle"]),
        most_switches=most["survival"],
        pat_most_switches=most["pat"],
    )


def sum_total(cells: list[PolicyCell]) -> dict[str, float]:
    """Means and extremes over cells.

    ``worst_reachable``: the worst ratio to the best static layout among cells where the oracle itself keeps the goal.
    Starting in the base layout and paying for a switch it cannot everywhere.
    """
    mean = {
        name: float(np.mean([getattr(c, name) for c in cells]))
        for name in ("pat_regret", "survival_regret", "pat_decided", "survival_decided", "first_regret")
    }
    reachable = [c.static_over_survival for c in cells if c.static_over_oracle >= STATIC_GOAL]
    return mean | {
        "cells": len(cells),
        "ratio": mean["survival_regret"] / mean["pat_regret"],
        "ratio_decided": mean["survival_decided"] / max(mean["pat_decided"], 1e-9),
        "worst": min(c.static_over_survival for c in cells),
        "worst_pat": min(c.static_over_pat for c in cells),
        "worst_oracle": min(c.static_over_oracle for c in cells),
        "worst_reachable": min(reachable, default=float("nan")),
        "unreachable": len(cells) - len(reachable),
        "most_switches": max(c.most_switches for c in cells),
        "pat_most_switches": max(c.pat_most_switches for c in cells),
    }


def format_tables(cells: list[PolicyCell]) -> tuple[Table, dict[str, dict]]:
    """Tables by profile, shape, ρ and batch, and over all."""
    table = Table(
        title="Mean regret against the oracle (decisions: round 1 is known to be complete too); best static layout's "
        "time over the policy's, worst cell; most switches in a round"
    )
    heads = ("cells", "pat", "survival", "pat, decisions", "survival", "of pat's", "1st round", "worst pat", "survival",
             "oracle", "pat, switches", "survival")  # fmt: skip
    for name in ("", *heads):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    result = {"all": sum_total(cells)}
    for key in ("profile", "shape", "rho", "batch"):
        for value in dict.fromkeys(getattr(c, key) for c in cells):
            label = f"{key} {value}" if key in ("rho", "batch") else str(value)
            result[label] = {"by": key} | sum_total([c for c in cells if getattr(c, key) == value])
    section = None
    for name, row in result.items():
        if row.get("by") != section:
            table.add_section()
            section = row.get("by")
        shares = ("pat_regret", "survival_regret", "pat_decided", "survival_decided")
        table.add_row(
            name, str(row["cells"]), *(f"{row[share]:.2%}" for share in shares), f"{row['ratio_decided']:.2f}",
            f"{row['first_regret']:.2%}", *(f"{row[worst]:.3f}" for worst in ("worst_pat", "worst", "worst_oracle")),
            str(row["pat_most_switches"]), str(row["most_switches"]),
        )  # fmt: skip
    return table, result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds: under 2 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all figures")
    parser.add_argument("--image", type=Path, metavar="FILE", help="default docs/img/replay.png; none with --quick")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default 0)")
    parser.add_argument("--wrong", type=float, metavar="SHARE", help="by which each layout's step times are off")
    text = f"with --wrong: of {', '.join(wrong_profiles.KINDS)} (default layout), or another machine's profile"
    parser.add_argument("--errors", nargs="+", default=["layout"], metavar="KIND", help=text)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="with --wrong: so many, from --seed on")
    default = wrong_profiles.CALIBRATION_NOISE
    text = f"with --wrong: of a turn of the calibration (default {default})"
    parser.add_argument("--calibration", type=float, default=default, metavar="NOISE", help=text)
    parser.add_argument("--uncalibrated", action="store_true", help="with --wrong: there is no calibration")
    parser.add_argument("--profiles", nargs="+", type=Path, metavar="FILE", help="default: studies/profiles/*.json")
    args = parser.parse_args(argv)
    args.profiles = args.profiles or sorted(PROFILES.glob("*.json"))
    if not args.profiles:
        parser.error(f"no profiles in {ROOT / 'profiles'}; give --profiles FILE")
    for path in [*args.profiles, *(Path(e) for e in args.errors if e not in wrong_profiles.KINDS)]:
        try:
            load(path, complete=True)
        except ValueError as error:
            parser.error(str(error))
    if args.wrong is not None and not 0 <= args.wrong < 1:
        parser.error(f"--wrong {args.wrong}: must be at least 0 and below 1")
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: must be at least 1")
    if args.image is None and not args.quick:
        args.image = ROOT / "docs" / "img" / "replay.png"
    return args


def study_wrong(args: argparse.Namespace, console: Console, cells: list[tuple[str, float, int]], rounds: int) -> int:
    """The study on wrong profiles; ``cells``: (shape, ρ, batch)."""
    tasks = [
        wrong_profiles.WrongProfileTask(
            path=str(path), shape=shape, rho=rho, batch=batch, rounds=rounds, seed=args.seed + number,
            wrong=args.wrong, error=error, calibration=None if args.uncalibrated else args.calibration, spacing=SPACING,
        )
        for error in args.errors for path in args.profiles for shape, rho, batch in cells
        for number in range(args.seeds)
    ]  # fmt: skip
    with ProcessPoolExecutor(args.jobs) as pool:
        done = pool.map(wrong_profiles.study, tasks)
        studied = [cell for cell in track(done, "cells", len(tasks), console=Console(stderr=True)) if cell is not None]
    console.print(wrong_profiles.format_table(studied, args.wrong))
    if args.json:
        args.json.write_text(json.dumps([asdict(cell) for cell in studied], indent=1) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console(highlight=False, width=160 if not sys.stdout.isatty() else None)
    shapes = ("deepscaler", "rollpacker") if args.quick else tuple(NAMED)
    batches, rhos, rounds = ((16, 128), (0.5,), 2) if args.quick else (BATCHES, CORRELATIONS, 4)
    if args.wrong is not None:
        return study_wrong(args, console, [(s, rho, b) for s in shapes for rho in rhos for b in batches], rounds)
    drawn = (rounds, args.seed)
    tasks = [(str(p), s, rho, b, *drawn) for p in args.profiles for s in shapes for rho in rhos for b in batches]
    with ProcessPoolExecutor(args.jobs) as pool:
        studied = list(track(pool.map(study, tasks), "cells", len(tasks), console=Console(stderr=True)))
    cells = [cell for cell in studied if cell is not None]
    table, totals = format_tables(cells)
    console.print(table)
    every = totals["all"]
    console.print(
        f"{len(cells)} cells, {len(tasks) - len(cells)} left out (KV does not fit).\n"
        f"Mean regret of survival's decisions: {every['ratio_decided']:.2f} of pat's (goal: at most {REGRET_GOAL}); "
        f"with the first two rounds, in which both wait for more requests, {every['ratio']:.2f}.\n"
        f"Worst against the best static layout: {every['worst']:.3f}; where the oracle keeps {STATIC_GOAL}: "
        f"{every['worst_reachable']:.3f} (goal: at least {STATIC_GOAL}). In {every['unreachable']} cells it cannot: "
        f"the base layout and the switch cost more.\nMost switches in a round: {every['most_switches']}."
    )
    settings = pat_settings.list_settings(2 if args.quick else 8)
    console.print(pat_settings.format_table(settings))
    throughputs = pat_settings.list_throughputs(2 if args.quick else 8)
    console.print(pat_settings.format_throughputs(throughputs))
    if args.image:
        from studies.policies_picture import draw

        draw([asdict(cell) for cell in cells], args.image)
        console.print(f"wrote {args.image}")
    if args.json:
        values = {
            "totals": totals,
            "cells": [asdict(c) for c in cells],
            "pat_settings": settings,
            "pat_throughputs": throughputs,
        }
        args.json.write_text(json.dumps(values, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.policies", main))
