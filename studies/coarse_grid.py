"""Does a profile on a coarse grid decide as well as one on a fine grid, also where step times bend between its points?

    python -m studies.coarse_grid [--quick] [--jobs N]

Steps take what a modelled profile says at all its points, bent or not; ``survival`` has all of them, or those of the
coarse grid that ``profiler.sweep`` measures.  Modelled and simulated, so that no machine matters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from profiler.grid import BATCHES, CONTEXTS
from sglang_pat.predict.profile import DecodePoint, load
from sglang_pat.tools.commands import Parser, run
from studies import PROFILES
from studies.compare import Machine, Workload, compare, compute_regrets
from studies.shapes import parse_shape
from studies.wrong_profiles import CALIBRATION_NOISE, NOISE

NAMES = ("8xA40-llama3.1-8b", "8xH100-llama3.1-8b", "8xH100-qwen3-14b")
BEND = 0.1
"""Share by which a step takes longer, or less, in the middle between two points of the coarse grid."""
SHORTEST = 128
"""Tokens: shortest context of the modelled profiles, in place of the coarse grid's 64."""
COARSE = (SHORTEST, *CONTEXTS[1:])


def _bend_nothing(point: DecodePoint) -> float:
    return 0.0


def _bend_short(point: DecodePoint) -> float:
    """Half way from the shortest context to the next one, for all batches."""
    return _find_place(point.context, COARSE) if point.context < COARSE[1] else 0.0


def _bend_all(point: DecodePoint) -> float:
    """Half way between any two batches or contexts of the coarse grid."""
    return max(_find_place(point.context, COARSE), _find_place(point.batch, BATCHES))


BENDS: dict[str, Callable[[DecodePoint], float]] = {
    "as modelled": _bend_nothing,
    "bent between 128 and 512 tokens": _bend_short,
    "bent between all batches and contexts": _bend_all,
}
"""Shares of :data:`BEND`: 0 at a point of the coarse grid, 1 half way to the next.  Degrees bend up, down, up …"""


def _find_place(value: float, grid: Sequence[int]) -> float:
    logs = np.log(grid)
    low = int(np.clip(np.searchsorted(grid, value, side="right") - 1, 0, len(grid) - 2))
    return float(np.sin(np.pi * np.clip((np.log(value) - logs[low]) / (logs[low + 1] - logs[low]), 0, 1)))


@cache
def make_machines(name: str, bend: str) -> tuple[Machine, Machine]:
    """The machine as it is, and what the coarse grid shows of it."""
    profile = load(PROFILES / f"{name}.json")
    signs = {tp: (-1) ** place for place, tp in enumerate(profile.fingerprint.degrees)}
    points = tuple(
        msgspec.structs.replace(point, seconds=point.seconds * (1 + BEND * signs[point.tp] * BENDS[bend](point)))
        for point in profile.decode
    )
    coarse = tuple(point for point in points if point.batch in BATCHES and point.context in COARSE)
    fine, thin = (Machine(msgspec.structs.replace(profile, decode=decode)) for decode in (points, coarse))
    return fine, thin


def study(name: str, bend: str, rho: float, batch: int, rounds: int) -> tuple[float, float]:
    """Mean regret of a cell's rounds against the oracle, with all points and with those of the coarse grid."""
    fine, thin = make_machines(name, bend)
    workload = Workload(shape=parse_shape("deepscaler"), batch=batch, rounds=rounds, correlation=rho)
    runs = (
        compare(fine, workload, ["survival"], believed=machine, noise=NOISE, calibration=CALIBRATION_NOISE)
        for machine in (fine, thin)
    )
    all_points, coarse = (float(compute_regrets(run, "survival").mean()) for run in runs)
    return all_points, coarse


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one profile, one round")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args(argv)
    cells = list(product(BENDS, NAMES[:1] if args.quick else NAMES, (0.0, 0.8), (64, 256)))
    with ProcessPoolExecutor(args.jobs) as pool:
        rounds = 1 if args.quick else 3
        regrets = list(pool.map(study, *zip(*((n, b, rho, batch, rounds) for b, n, rho, batch in cells), strict=True)))
    table = Table("step times", "cells", "all points", "coarse grid", title="Mean regret (worst cell)")
    for bend in BENDS:
        rows = np.array([regret for cell, regret in zip(cells, regrets, strict=True) if cell[0] == bend])
        shares = (f"{mean:.2%} ({worst:.2%})" for mean, worst in zip(rows.mean(0), rows.max(0), strict=True))
        table.add_row(bend, str(len(rows)), *shares)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.coarse_grid", main))
