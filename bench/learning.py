"""What the ways to generate do to learning: the example of GRPO in each of them, with the same problems and seeds.

    python bench/learning.py [--quick] [--ways WAY ...] [--seeds 0 1 2] [--out DIR] [--json FILE]

Each run is a process of its own and leaves its figures in ``--out``.  Started again it goes on with the run, and the
step, that it was in; runs that are there are not run again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import _bench
import _redraw
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.grpo.picture import Results
from examples.grpo.train import RULES
from sglang_pat import files

ROOT = Path(__file__).resolve().parents[1]
QUICK = "--steps 4 --prompts 8 --responses 8 --held-out 32 --every 2 --warm-up 20".split()
PICTURE = ROOT / "docs" / "img" / "learning.png"
Found = dict[str, dict[int, Results]]
"""Results by way and seed."""


def run(ways: Sequence[str], seeds: Sequence[int], out: Path, options: Sequence[str]) -> Found:
    """Run all ways of a seed, then those of the next one."""
    results: Found = {way: {} for way in ways}
    for seed in seeds:
        for way in ways:
            folder = out / f"{way}-{seed}"
            if not (folder / "figures.json").exists():
                words = ["--way", way, "--seed", str(seed), "--out", str(folder), *options]
                subprocess.run([sys.executable, "-m", "examples.grpo", *words], cwd=ROOT, check=True)
            results[way][seed] = msgspec.json.decode(files.read(folder / "figures.json"), type=Results)
    return results


def make_curve(results: Results) -> tuple[list[int], list[float]]:
    """(responses trained, mean reward on the held-out problems) of each test."""
    tests = results.list_tests()
    return [test[0] for test in tests], [test[2] for test in tests]


def make_mean_curve(runs: Sequence[Results], grid: Sequence[float]) -> np.ndarray:
    """Mean reward on the held-out problems over the seeds, at each number of responses of ``grid``."""
    return np.mean([np.interp(grid, *make_curve(one)) for one in runs], axis=0)


def make_grid(found: Found) -> list[float]:
    """Numbers of responses at which curves are compared: those of the first run's tests, 0 left out."""
    return [float(x) for x in make_curve(next(iter(next(iter(found.values())).values())))[0][1:]]


def count_inside(found: Found, way: str, plain: str = "plain") -> tuple[int, int]:
    """Number of tests at which the mean over the seeds is between ``plain``'s worst and best seed; and number of
    tests."""
    grid = make_grid(found)
    curves = [np.interp(grid, *make_curve(one)) for one in found[plain].values()]
    curve = make_mean_curve(list(found[way].values()), grid)
    inside = (curve >= np.min(curves, axis=0)) & (curve <= np.max(curves, axis=0))
    return int(inside.sum()), len(grid)


def show(console: Console, found: Found) -> None:
    """A row for each way; values of several seeds are separated by commas."""
    table = Table(title="the same problems in each way, by seed", title_justify="left")
    for column in (
        "way", "held out before", "after", "mean of the curve", "inside plain's seeds", "minutes",
        "generation, s a step", "tokens returned", "of the longest tenth", "thrown", "steps",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for way, runs in found.items():
        table.add_row(way, *_cells(found, way, list(runs.values())))
    console.print(table)


def _cells(found: Found, way: str, runs: list[Results]) -> list[str]:
    def each(value: Callable[[Results], float], form: str) -> str:
        return ", ".join(format(value(one), form) for one in runs)

    inside, tests = count_inside(found, way) if "plain" in found else (0, 0)
    grid = make_grid(found)
    return [
        each(lambda one: one.before, ".3f"), each(lambda one: one.after, ".3f"),
        f"{make_mean_curve(runs, grid).mean():.3f}", f"{inside} of {tests}",
        each(lambda one: one.rows[-1].seconds / 60, ".1f"),
        each(lambda one: mean(row.parts["generation"] for row in one.rows), ".2f"),
        each(lambda one: mean(length for row in one.rows for length in row.lengths), ".1f"),
        each(_compute_tail, ".1f"), each(_compute_thrown, ".0%"), each(lambda one: len(one.rows), ".0f"),
    ]  # fmt: skip


def _compute_tail(results: Results) -> float:
    """Mean length of the longest tenth of all responses that were trained."""
    lengths = sorted(length for row in results.rows for length in row.lengths)
    return mean(lengths[-(len(lengths) // 10 or 1) :])


def _compute_thrown(results: Results) -> float:
    """Share of all tokens that were generated."""
    thrown = sum(row.thrown for row in results.rows)
    return thrown / (thrown + sum(sum(row.lengths) for row in results.rows))


def draw(path: Path, found: Found) -> Path:
    return _redraw.draw_learning(
        {way: ([one.before for one in runs.values()], [one.after for one in runs.values()])
         for way, runs in found.items()}, path
    )  # fmt: skip


def main() -> int:
    parser = _bench.options(__doc__, "two ways, one seed, four small steps; no picture")
    parser.add_argument("--ways", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "learning", help="default: %(default)s")
    args = parser.parse_args()
    machine = _bench.about()
    if args.quick:
        results = run(("plain", "all"), args.seeds[:1], args.out / "quick", QUICK)
    else:
        results = run(args.ways, args.seeds, args.out, ())
        draw(PICTURE if args.ways == list(RULES) else args.out / PICTURE.name, results)
    show(Console(width=170), results)
    runs = {way: {seed: msgspec.to_builtins(one) for seed, one in of.items()} for way, of in results.items()}
    _bench.write(args.json, machine=machine, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
