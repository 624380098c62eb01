"""A step of verl that trains on groups while others are generated, against one that waits, and one that fetches once.

    .venv-integration/bin/python bench/streaming.py [--quick] [--repeats N] [--steps N] [--shares S …] [--json FILE]

The trainer has one rank and the engine another, each a core of its own.  Lengths are drawn with a long tail and given
to the engine, so that all ways do the same work in the same step.  The jobs take turns, and steps are compared with the
same step of the same turn.  The first step of a job does not count: everything is new.  Needs the environment of ``make
test-integration``, and a machine with two quiet cores.
``--quick`` takes four minutes.

``whole``: train when the batch is there.  ``once N%``: train on so much of it when that is there, and on the rest when
all of it is (RollPacker's Table 4).  ``stream``: ``trainer.v1.trainer_mode=sglang_pat_stream``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import mean, median

import _bench
import _verl_jobs
from _verl_jobs import APART, Steps
from rich.console import Console
from rich.table import Table

from sglang_pat.testing import models

MODEL = Path(".cache/models/llama-stream")
"""A small Llama whose probabilities are far from 0 and 1."""
COLUMNS = {
    "step, s": "timing_s/step",
    "waits, s": "timing_s/gen",
    "weights, s": "timing_s/update_weights",
    "training hidden, s": "training/stream/hidden_seconds",
    "not hidden, s": "training/stream/exposed_seconds",
    "chunks": "training/stream/chunks",
}


def run(mode: str, share: float, args: argparse.Namespace) -> Steps:
    """Run one job."""
    more = ("--gpus", "1", "--settings", "{base_tp:1}", f"trainer.v1.trainer_mode={mode}", *APART)
    return _verl_jobs.run(
        args, MODEL, "_stream_job.DrawnLengths", *more, "ray_kwargs.ray_init.num_gpus=2", FETCH_SHARE=str(share)
    )


def compare(found: dict[str, Steps]) -> dict[str, list[float]]:
    """Times that each step takes as long as with ``stream``."""
    name = "timing_s/step"
    return {
        way: [one[name] / other[name] for one, other in zip(steps, found["stream"], strict=True)]
        for way, steps in found.items()
    }


def show(found: dict[str, Steps]) -> None:
    table = Table(title="means over steps; of the ratio the median, the least and the most", title_justify="left")
    for column in ("way", "steps", *COLUMNS, "step / stream's"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, longer in compare(found).items():
        values = [f"{mean(step[name] for step in found[way]):.2f}" for name in COLUMNS.values()]
        table.add_row(way, str(len(found[way])), *values, f"{median(longer):.2f} ({min(longer):.2f}-{max(longer):.2f})")
    Console(width=140).print(table)


def main() -> None:
    parser = _bench.options(__doc__ or "", "two steps that count of each way, one repeat, one share")
    _verl_jobs.add_options(parser, repeats=2, steps=6, batch=32, samples=4, response=1536)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5])
    args = parser.parse_args()
    _verl_jobs.need_verl()
    if args.quick:
        args.repeats, args.steps, args.shares = 1, 3, [0.3]
    models.make_random("llama", MODEL, heads=4, kv_heads=2, logit_std=1)
    machine = _bench.about(batch=args.batch, samples=args.samples, response=args.response, load=os.getloadavg()[0])
    ways = {"whole": ("fetch_whole", 1.0), "stream": ("sglang_pat_stream", 1.0)}
    ways |= {f"once {share:.0%}": ("fetch_once", share) for share in args.shares}
    steps_by_way: dict[str, Steps] = {way: [] for way in ways}
    for _ in range(args.repeats):
        for way, (mode, share) in ways.items():
            steps_by_way[way] += run(mode, share, args)
    show(steps_by_way)
    columns = {
        way: [{name: step[name] for name in COLUMNS.values()} for step in steps] for way, steps in steps_by_way.items()
    }
    _bench.write(args.json, about=machine, steps=columns, longer=compare(steps_by_way))


if __name__ == "__main__":
    main()
