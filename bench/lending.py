"""Is a training step faster if a rank is lent while its round drains?  The example of GRPO, three ways in turn.

    python bench/lending.py [--quick] [--rounds N] [--model FOLDER --task NAME] [--json FILE]

``never`` trains after the round, ``policy`` asks the engine's policy, ``always`` lends at the first milestone and takes
back when the round is over.  The rate of learning is so small that all steps are alike.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import _bench
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.grpo import countdown, gym
from examples.grpo.__main__ import MODELS
from examples.grpo.policy import warm_up
from examples.grpo.train import Row, Run, Trainer, start_engine
from sglang_pat.policies.lending import FIRST_MILESTONE, Move

WAYS = ("never", "policy", "always")
WARM = 2
"""Steps before the first that counts: in them it is measured what training takes."""


def make_decide(way: str, trainer: Trainer) -> Any:
    def decide(**about: Any) -> dict[str, Any]:
        first = not trainer.lending.moves and about["complete"] >= FIRST_MILESTONE * about["samples"]
        return {"move": Move.LEND if way == "always" and first else Move.WAIT}

    return trainer.engine.decide_lending if way == "policy" else decide


def run(trainer: Trainer, rounds: int) -> dict[str, list[Row]]:
    """Steps of each way, round by round in turn."""
    rows: dict[str, list[Row]] = {way: [] for way in WAYS}
    for _ in range(WARM):
        trainer.step()
    for number in range(rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            trainer.lending.decide = make_decide(way, trainer)
            rows[way].append(trainer.step())
    return rows


def show(console: Console, found: dict[str, list[Row]]) -> None:
    table = Table(title="a step, by when its first groups are trained (medians)", title_justify="left")
    for column in ("way", "seconds", "from", "to", "to the last token", "after it", "lent", "hidden", "never over"):
        table.add_column(column, justify="right")
    seconds = {way: [sum(row.parts.values()) for row in rows] for way, rows in found.items()}
    for way, rows in found.items():
        steps = [row.timeline for row in rows]
        parts = median(step.over for step in steps), median(step.end - step.over for step in steps)
        lent = [step for step in steps if step.lent]
        ratios = [never / ours for never, ours in zip(seconds["never"], seconds[way], strict=True)]
        table.add_row(
            way, *(f"{value:.2f}" for value in (median(seconds[way]), min(seconds[way]), max(seconds[way]), *parts)),
            f"{len(lent)} of {len(rows)}", f"{mean(one.hidden for one in lent):.0%}" if lent else "-",
            f"{median(ratios):.2f}",
        )  # fmt: skip
    console.print(table)


def begin(args: Any, steps: int, folder: Path) -> Trainer:
    sizes: dict[str, int] = {"prompts": 8, "responses": 8} if args.quick or args.model else {}
    run = Run(
        way="adaptive", lend=True, steps=steps, rate=1e-9, held_out=8, every=10 * steps, model=args.model,
        task=args.task, **sizes,
    )  # fmt: skip
    drawn = run.steps * run.prompts, run.held_out, run.seed
    if run.model:
        model, task = Path(run.model), gym.draw_task(run.task, Path(run.model), run.limit, *drawn)
    else:
        torch.set_num_threads(1)
        model = warm_up(MODELS / f"countdown-0-{run.warm_up}-{run.slips}", 0, run.warm_up, run.slips)
        task = countdown.draw_task(*drawn)
    return Trainer(run, start_engine(run, model), model, task, folder / "checkpoint.pt", None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _bench.options(__doc__, "small steps")
    parser.add_argument("--rounds", type=int, help="steps of each way (default: 7, with --quick 2)")
    parser.add_argument("--model", default="", metavar="FOLDER", help="as of examples.grpo")
    parser.add_argument("--task", default="", metavar="NAME")
    args = parser.parse_args(argv)
    machine = _bench.about()
    rounds = args.rounds or (2 if args.quick else 7)
    with tempfile.TemporaryDirectory() as folder:
        trainer = begin(args, WARM + rounds * len(WAYS), Path(folder))
        try:
            measured = run(trainer, rounds)
        finally:
            trainer.engine.shutdown()
    show(Console(width=150), measured)
    rows = {way: [{"parts": row.parts, "lengths": row.lengths} for row in rows] for way, rows in measured.items()}
    _bench.write(args.json, machine=machine, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
