"""Ranks lent to the trainer in the middle of a round: what a step takes, against not lending and against an oracle.

    python -m studies.lending [--quick [--store]] [--seeds N] [--jobs N] [--seed N] [--json FILE]

A step is a round and the training of its samples (:mod:`studies.training`).  Training takes a share of the round as
RollPacker has it (Table 1: rollout 71%, training 22%), of the round in the base layout without lending.  Seven ways:

- ``base``: the base layout to the end, no lending;
- ``40%``, ``50%``: RollPacker's way: half of the ranks when so much of the requests has ended, the same degree, KV is
  computed anew, no return before the end;
- ``adaptive``: ``survival``, no lending;
- ``fixed``: ``survival``, half of the ranks when 50% of the requests have ended, KV is moved, no return before the end;
- ``ours``: ``survival`` and the policy of ``policies/lending.py``;
- ``oracle``: the best moments and layouts for one who knows all lengths.

With ``--seeds`` only ``adaptive`` and ``ours`` are compared, step by step, over so many seeds, few and large groups
included, and with what the client says of the training wrong by two: by how much is a step behind not lending?

Simulated, so that the machine does not matter; the same seeds give the same figures.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from msgspec import structs
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.policies.lending import Training, make_lending_policy
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.predict.profile import load
from sglang_pat.tools.commands import Parser, run
from studies import PROFILES
from studies.compare import ProfiledMachine, Workload
from studies.shapes import parse_shape
from studies.simulate import Batch, describe_queueing
from studies.training import SimulatedStep, StepReplay

STORED = Path(__file__).with_suffix(".csv")
"""The table of ``--quick``, which docs/results/training.md quotes."""
MACHINES = (
    "8xH100-llama3.1-8b", "8xH100-qwen3-14b", "8xH100-qwen2.5-32b", "8xH100-qwen3-30b-a3b", "8xA40-llama3.1-8b",
)  # fmt: skip
SHAPES = ("rollpacker", "deepscaler", "sft")
CORRELATIONS, BATCHES = (0.0, 0.5, 0.8), (64, 256, 512)
TRAINING = {"as in the paper": 22 / 71, "half of it": 11 / 71, "twice": 44 / 71}
"""Seconds of training over seconds of the round in the base layout."""
ROUNDS, SPACING = 3, 32
SETUP = 2.0
"""Seconds between a lending and the first token that is trained: weights come from host memory.  A guess."""
SIZES = ((8, 2), (16, 4), (32, 16), (64, 8), (64, 32), (256, 8), (512, 8))
"""Responses of a batch and of a group, tried with ``--seeds``.  The correlation follows the seed."""
RIGHT = "right"
WRONG = {
    f"{field} {name}": {field: factor}
    for field in ("seconds_per_token", "slowdown", "setup") for name, factor in (("doubled", 2.0), ("halved", 0.5))
}  # fmt: skip
"""What a client may say of a training that is as in the paper: factors of what is right."""
FEW = 64
"""Most responses with which a setting counts as small: with more no step is behind."""
WAYS = ("base", "40%", "50%", "adaptive", "fixed", "ours", "oracle")
GOAL, GOAL_IF_WRONG = 0.02, 0.05
"""Most that a step with lending may take longer than without, and the same where the client is wrong by two."""


@dataclass(frozen=True)
class LendingCell:
    """Mean figures of some steps: seconds by way; of ours, shares of the training that is hidden and of the round in
    which ranks are lent, and the most that KV took of the room of the ranks that stayed."""

    machine: str
    shape: str
    rho: float
    batch: int
    training: str
    seconds: dict[str, float]
    worst: float
    hidden: float
    lent: float
    steps_lent: int
    overfull: float

    def over(self, way: str, base: str) -> float:
        """Time of a step in ``base``, over that in ``way``."""
        return self.seconds[base] / self.seconds[way]


@cache
def make_machine(name: str) -> ProfiledMachine:
    return ProfiledMachine(load(PROFILES / f"{name}.json", complete=True))


def replay(machine: ProfiledMachine, batch: Batch, share: float) -> StepReplay:
    """Replay of a step whose training takes this share of its round in the base layout."""
    fingerprint = machine.profile.fingerprint

    def make(seconds_per_token: float) -> StepReplay:
        return StepReplay(
            machine.predictor, machine.costs, fingerprint, batch, seconds_per_token=seconds_per_token, setup=SETUP,
            spacing=SPACING,
        )  # fmt: skip

    rollout = make(0.0).run_static(fingerprint.base_tp).rollout
    return make(share * rollout / float((batch.prompt + batch.length).sum()))


def study(task: tuple[str, str, float, int, str, int]) -> LendingCell | None:
    """One cell; None if its batch does not fit."""
    name, shape, rho, batch, training, seed = task
    machine = make_machine(name)
    fingerprint = machine.profile.fingerprint
    workload = Workload(shape=parse_shape(shape), batch=batch, rounds=ROUNDS, correlation=rho, seed=seed)
    if any(describe_queueing(fingerprint, drawn) for drawn in workload.make_batches()):
        return None
    layouts = machine.make_policy("survival")
    lending = make_lending_policy(
        machine.predictor, machine.costs, fingerprint.num_ranks, fingerprint.degrees, fingerprint.max_running
    )
    without, fixed, ours = LengthHistory(), LengthHistory(), LengthHistory()
    steps_by_way: dict[str, list[SimulatedStep]] = {way: [] for way in WAYS}
    rollouts: list[float] = []
    for drawn in workload.make_batches():
        step = replay(machine, drawn, TRAINING[training])
        steps_by_way["base"].append(step.run_static(fingerprint.base_tp))
        steps_by_way["40%"].append(step.run_static(fingerprint.base_tp, 0.4))
        steps_by_way["50%"].append(step.run_static(fingerprint.base_tp, 0.5))
        steps_by_way["adaptive"].append(step.run_policies(layouts, None, without))
        steps_by_way["fixed"].append(step.run_policies(layouts, None, fixed, share=0.5))
        steps_by_way["ours"].append(step.run_policies(layouts, lending, ours))
        steps_by_way["oracle"].append(step.run_best())
        rollouts.append(step.training_seconds)
    seconds = {way: np.array([one.seconds for one in steps]) for way, steps in steps_by_way.items()}
    lent_steps = steps_by_way["ours"]
    return LendingCell(
        machine=name, shape=shape, rho=rho, batch=batch, training=training,
        seconds={way: float(each.mean()) for way, each in seconds.items()},
        worst=float((seconds["ours"] / seconds["adaptive"]).max() - 1),
        hidden=float(np.mean([one.hidden / whole for one, whole in zip(lent_steps, rollouts, strict=True)])),
        lent=float(np.mean([(one.lent[1] - one.lent[0]) / one.rollout if one.lent else 0.0 for one in lent_steps])),
        steps_lent=sum(one.lent is not None for one in lent_steps),
        overfull=max(one.overfull for one in lent_steps),
    )  # fmt: skip


@dataclass(frozen=True)
class Risk:
    """Some steps of a job: by how much each was behind not lending, as a share, and how many had ranks lent."""

    machine: str
    shape: str
    rho: float
    size: tuple[int, int]
    seed: int
    training: str
    believed: str
    behind: list[float]
    lent: int


def believe(factors: dict[str, float]) -> Callable[[Training], Training]:
    """What a client says that is wrong by these factors."""

    def change(right: Training) -> Training:
        told = {name: factor * getattr(right, name) for name, factor in factors.items()}
        return structs.replace(right, **{name: max(value, float(name == "slowdown")) for name, value in told.items()})

    return change


def study_risk(task: tuple[str, str, tuple[int, int], int]) -> list[Risk]:
    """A job with each amount of training, and with each thing that a client may say; none if a batch does not fit."""
    name, shape, (batch, group), seed = task
    machine, rho = make_machine(name), CORRELATIONS[seed % len(CORRELATIONS)]
    fingerprint = machine.profile.fingerprint
    workload = Workload(
        shape=parse_shape(shape), batch=batch, rounds=ROUNDS, correlation=rho, group=group, seed=seed
    )  # fmt: skip
    batches = list(workload.make_batches())
    if any(describe_queueing(fingerprint, drawn) for drawn in batches):
        return []
    layouts = machine.make_policy("survival")
    lending = make_lending_policy(
        machine.predictor, machine.costs, fingerprint.num_ranks, fingerprint.degrees, fingerprint.max_running
    )
    ways = [(training, RIGHT) for training in TRAINING]
    if batch <= FEW:
        ways += [("as in the paper", wrong) for wrong in WRONG]
    behind: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    lent = dict.fromkeys(ways, 0)
    without, histories = LengthHistory(), {way: LengthHistory() for way in ways}
    for drawn in batches:
        step = replay(machine, drawn, 1.0)  # what a batch takes, and its layouts, do not depend on the training
        whole, plain = step.training_seconds, step.run_policies(layouts, None, without)
        per_token = step.seconds_per_token
        for training, believed in ways:
            step.seconds_per_token = TRAINING[training] * per_token
            told = believe(WRONG[believed]) if believed in WRONG else None
            lent_step = step.run_policies(layouts, lending, histories[training, believed], believe=told)
            seconds = plain.rollout + TRAINING[training] * whole
            behind[training, believed].append(lent_step.seconds / seconds - 1)
            lent[training, believed] += lent_step.lent is not None
    return [
        Risk(name, shape, rho, (batch, group), seed, *way, behind=behind[way], lent=lent[way]) for way in ways
    ]  # fmt: skip


RISKS = ("steps", "mean", "worst step", "worst in later rounds", "more than 2% behind", "steps lent")


def list_risks(risks: list[Risk], by: str) -> list[tuple[str, ...]]:
    """Lines by value of ``by``; of all steps, and of those that are not a job's first."""
    lines: list[tuple[str, ...]] = []
    for key in dict.fromkeys(getattr(risk, by) for risk in risks):
        of_key = [risk for risk in risks if getattr(risk, by) == key]
        behind = np.array([risk.behind for risk in of_key])
        name = " in groups of ".join(map(str, key)) if by == "size" else str(key)
        lines.append((
            name, str(behind.size), f"{behind.mean():+.1%}", f"{behind.max():+.1%}", f"{behind[:, 1:].max():+.1%}",
            str((behind > GOAL).sum()), f"{sum(risk.lent for risk in of_key) / behind.size:.0%}",
        ))  # fmt: skip
    return lines


def format_risks(risks: list[Risk]) -> list[Table]:
    tables: list[Table] = []
    right = [risk for risk in risks if risk.believed == RIGHT]
    table = make_table("a step with lending, against the same without (simulated); negative is faster", ("", *RISKS))
    for by in ("size", "machine", "shape", "training", "rho"):
        for line in list_risks(right, by):
            table.add_row(*line)
        table.add_section()
    tables.append(table)
    table = make_table("the same, where the client is wrong by two", ("", *RISKS))
    for line in list_risks([risk for risk in risks if risk.training == "as in the paper"], "believed"):
        table.add_row(*line)
    return [*tables, table]


def run_risks(seeds: range, jobs: int, console: Console) -> list[Risk]:
    """All settings with each seed, in processes; tables are printed."""
    tasks = [(name, shape, size, seed) for size in SIZES for name in MACHINES for shape in SHAPES for seed in seeds]
    with ProcessPoolExecutor(jobs) as pool:
        done = list(track(pool.map(study_risk, tasks), "jobs", len(tasks), console=Console(stderr=True)))
    risks = [risk for task_risks in done for risk in task_risks]
    for table in format_risks(risks):
        console.print(table)
    for what, goal, some in (
        ("right", GOAL, [risk for risk in risks if risk.believed == RIGHT]),
        ("wrong by two", GOAL_IF_WRONG, [risk for risk in risks if risk.believed != RIGHT]),
    ):
        worst = max(some, key=lambda risk: max(risk.behind))
        where = f"{worst.machine}, {worst.shape}, {worst.size[0]} in groups of {worst.size[1]}, seed {worst.seed}"
        where += f", {worst.training}, {worst.believed}"
        console.print(f"{what}: worst step {max(worst.behind):+.1%} ({where}); goal {goal:.0%}")
    return risks


HEADS = (
    "training", "machine", "lengths", *(f"{way}, s" for way in WAYS), "ours: times as fast", "oracle", "hidden", "lent",
)  # fmt: skip


def list_rows(cells: list[LendingCell]) -> list[tuple[str, ...]]:
    """List a line for each cell, as ``studies/lending.csv`` has it."""
    return [
        (
            cell.training, cell.machine, cell.shape, *(f"{cell.seconds[way]:.1f}" for way in WAYS),
            *(f"{cell.over(way, 'adaptive'):.2f}" for way in ("ours", "oracle")), f"{cell.hidden:.0%}",
            f"{cell.lent:.0%}",
        )
        for cell in cells
    ]  # fmt: skip


TOTALS = ("cells", "50%", "adaptive", "ours", "oracle", "ours, worst step", "hidden", "lent", "steps lent", "KV, most")


def list_totals(cells: list[LendingCell], by: str) -> list[tuple[str, ...]]:
    """Means over cells, a line a value of ``by``: times as fast as ``base`` (50%, adaptive) and as ``adaptive``."""
    lines: list[tuple[str, ...]] = []
    for key in dict.fromkeys(getattr(cell, by) for cell in cells):
        of_key = [cell for cell in cells if getattr(cell, by) == key]
        ratios = [("50%", "base"), ("adaptive", "base"), ("ours", "adaptive"), ("oracle", "adaptive")]
        lines.append((
            str(key), str(len(of_key)), *(f"{np.mean([cell.over(*pair) for cell in of_key]):.3f}" for pair in ratios),
            f"{max(cell.worst for cell in of_key):+.1%}", f"{np.mean([cell.hidden for cell in of_key]):.0%}",
            f"{np.mean([cell.lent for cell in of_key]):.0%}",
            f"{sum(cell.steps_lent for cell in of_key)} of {ROUNDS * len(of_key)}",
            f"{max(cell.overfull for cell in of_key):.0%}",
        ))  # fmt: skip
    return lines


def make_table(title: str, heads: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    return table


def format_cells(cells: list[LendingCell]) -> Table:
    """Seconds of a step, cell by cell."""
    table = make_table("seconds of a step (simulated)", HEADS)
    for line in list_rows(cells):
        table.add_row(*line)
    return table


def format_totals(cells: list[LendingCell]) -> Table:
    table = make_table(
        "times as fast (simulated): 50% and adaptive over base, ours and oracle over adaptive", ("", *TOTALS)
    )
    for by in ("machine", "shape", "training", "batch", "rho"):
        for line in list_totals(cells, by):
            table.add_row(*line)
        table.add_section()
    return table


def list_tasks(quick: bool, seed: int) -> list[tuple[str, str, float, int, str, int]]:
    if quick:
        return [
            (name, shape, 0.5, 256, training, seed)
            for training in ("as in the paper", "half of it") for name in MACHINES for shape in SHAPES[:2]
        ]  # fmt: skip
    return [
        (name, shape, rho, batch, training, seed)
        for name in MACHINES for shape in SHAPES for rho in CORRELATIONS for batch in BATCHES for training in TRAINING
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m studies.lending", description="Steps with ranks lent to the trainer (simulated).")
    parser.add_argument("--quick", action="store_true", help="few settings")
    parser.add_argument("--store", action="store_true", help=f"with --quick: also write {STORED.name}")
    parser.add_argument("--seeds", type=int, metavar="N", help="how far single steps are behind, over N seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=170)
    if args.seeds:
        risks = run_risks(range(args.seed, args.seed + args.seeds), args.jobs, console)
        if args.json:
            args.json.write_text(json.dumps([asdict(risk) for risk in risks], indent=1) + "\n")
        return 0
    tasks = list_tasks(args.quick, args.seed)
    with ProcessPoolExecutor(args.jobs) as pool:
        done = list(track(pool.map(study, tasks), "cells", len(tasks), console=Console(stderr=True)))
    cells = [cell for cell in done if cell is not None]
    console.print(format_cells(cells) if args.quick else format_totals(cells))
    worst = max(cells, key=lambda cell: cell.seconds["ours"] / cell.seconds["adaptive"])
    console.print(
        f"{len(cells)} cells, {len(tasks) - len(cells)} left out (KV does not fit). Worst cell against not lending: "
        f"{1 / worst.over('ours', 'adaptive') - 1:+.2%} (goal: at most {GOAL:.0%})."
    )
    if args.store and args.quick:
        with STORED.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((HEADS, *list_rows(cells)))
    if args.json:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.lending", main))
