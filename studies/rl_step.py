"""A training step by stage, with one technique after the other, in RollPacker's settings (its Table 2).

    python -m studies.rl_step [--quick] [--jobs N] [--seeds N] [--json FILE] [--png FILE]

Rows are cumulative:

- ``plain``: prompts as they come, one layout; then all rewards; then all training;
- ``tail batching``: the admitter's strict mode, η = 1.25 for prompts and responses;
- ``rewards``: beside the rollout, with adaptive time limits (:mod:`reward_sandbox.limits`);
- ``adaptive TP``: each node changes its layout in the round, and starts it where it is best (``survival``);
- ``stream``: gradients are accumulated, group by group as rewards come, and half of a node's ranks are lent to the
  trainer in the round (``policies/lending.py``).

All nodes of a setting, on modelled profiles (:mod:`studies.rounds`); lengths, rewards and training as below.  Several
seeds, since a step depends on which responses reach the cap.  No machine matters; the same seeds give the same figures.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from reward_sandbox.limits import CaseRun, LimitRules, TimeLimits
from sglang_pat.policies.lending import make_lending_policy
from sglang_pat.policies.registry import make_policy
from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import load
from sglang_pat.rollout.records import SampleId
from sglang_pat.rollout.rules import Rules
from sglang_pat.tools import pictures
from sglang_pat.tools.commands import Parser, UsageError, run
from studies import PROFILES, step_picture
from studies.rounds import Engines, SimulatedRound, Simulation
from studies.shapes import parse_shape
from studies.tail_batching import SETTINGS, PaperSetting, Slower

ROWS = ("plain", "tail batching", "rewards", "adaptive TP", "stream")
REPORTED = {
    "7B, 8K": (1.0, 1.30, 2.01, 2.01, 2.03),
    "14B, 16K": (1.0, 1.48, 1.99, 2.02, 2.22),
    "32B, 32K": (1.0, 2.21, 2.48, 2.52, 2.56),
}
"""Speed-ups that RollPacker reports, cumulative (Table 2)."""

CORRELATION = 0.5
"""Correlation of the lengths of one prompt's responses."""
PARAMETERS = {"7B, 8K": 7.6, "14B, 16K": 14.8, "32B, 32K": 32.8}
"""Parameters in thousand millions, by setting."""
TRAINING_SHARE, MEASURED = 22 / 71, SETTINGS[1]
"""Seconds of training over seconds of a plain rollout, of the 14B (Table 1)."""
STEPS, SEEDS = 10, 4
"""Number of steps that count, after some that fill the queue, and of simulations with other lengths and rewards."""
QUICK_STEPS, QUICK_SEEDS = 3, 1
SETUP = 2.0
"""Seconds between a lending and the first token that is trained.  A guess."""

# Rewards: a third of the prompts each are mathematics, code, and for a judge (section 6).
MATH_SECONDS, JUDGE_SECONDS = 0.1, 2.0
"""Seconds of rewards, guessed; neither is what a step waits for."""
QUICKEST, SLOWEST = 0.05, 4.4
"""Seconds of right programs, by problem, most below one: those of ``bench/rewards.py``."""
ENDLESS, WRONG = 0.05, 0.4
"""Shares of programs that never end (Fig. 7a), and of other wrong ones."""


class RewardTimes:
    """Seconds that the reward of a sample takes; workers are enough for all that come.

    Args:
        limits: learnt from what is run; None: all programs have the longest limit.
    """

    def __init__(self, seed: int, limits: TimeLimits | None) -> None:
        self._seed, self._limits = seed, limits

    def __call__(self, sample: SampleId) -> float:
        kind = sample.index % 3
        if kind != 1:
            return JUDGE_SECONDS if kind else MATH_SECONDS
        problem = np.random.default_rng((self._seed, 3, sample.index)).random()
        draw = np.random.default_rng((self._seed, 4, sample.index, sample.number, sample.attempt))
        needed = QUICKEST * (SLOWEST / QUICKEST) ** (problem * problem) * draw.uniform(0.9, 1.1)
        fate = draw.random()
        endless, right = fate < ENDLESS, fate >= ENDLESS + WRONG
        key = str(sample.index)
        limit = self._limits.get_limits([key])[0] if self._limits is not None else LimitRules.maximum
        cut = endless or needed > limit
        took = limit if cut else float(needed)
        if self._limits is not None:
            self._limits.record([CaseRun(key, "cut" if cut else "right" if right else "wrong", took, limit)])
        return took


@dataclass(frozen=True)
class StepJob:
    """One simulation: so many ``rounds`` count, after some that fill the queue; ``seconds_per_token`` of training on
    all ranks of a node."""

    setting: PaperSetting
    row: str
    rounds: int
    seed: int
    seconds_per_token: float


@dataclass(frozen=True)
class Stages:
    """Mean seconds of a step: the rollout, then waiting for rewards, then training.  In ``stream`` all ranks train
    while other rewards come, so only the time in which they have nothing to train counts as waiting.

    Attributes:
        hidden: training done during the rollout, in seconds on all ranks; ``lent``: seconds in which a node's ranks
            were lent.
        tokens: trained in a step, by all nodes.
    """

    rollout: float
    reward: float
    training: float
    hidden: float
    lent: float
    tokens: float

    @property
    def seconds(self) -> float:
        return self.rollout + self.reward + self.training


def simulate(job: StepJob) -> Stages:
    """One row in one setting, with one seed."""
    setting, level = job.setting, ROWS.index(job.row)
    profile = load(PROFILES / f"{setting.profile}.json", complete=True)
    predictor, costs = build_predictors(profile)
    if setting.slower != 1:
        predictor = Slower(predictor, setting.slower)
    fingerprint = profile.fingerprint
    policies = {"predictor": predictor, "costs": costs}
    adaptive, streams, overlaps = level >= 3, level >= 4, level >= 2
    nodes = setting.gpus // fingerprint.num_ranks
    engines = Engines(
        predictor=predictor, costs=costs, fingerprint=fingerprint, nodes=nodes, tp=setting.tp,
        policy=make_policy("survival", **policies) if adaptive else None,
        lending=make_lending_policy(**policies, num_ranks=fingerprint.num_ranks, degrees=fingerprint.degrees)
        if streams else None,
        seconds_per_token=job.seconds_per_token, setup=SETUP,
        reward_seconds=RewardTimes(job.seed, TimeLimits() if overlaps else None),
    )  # fmt: skip
    eta = 1.25 if level >= 1 else 1.0
    rules = Rules(
        mode="strict", num_prompts=128, num_responses=8, eta_prompts=eta, eta_responses=eta, max_deferrals=64
    )  # fmt: skip
    simulation = Simulation(engines, rules, parse_shape(setting.compute_lengths), CORRELATION, seed=job.seed)
    warm = min(5, job.rounds)
    counted = [simulation.run_round(version) for version in range(warm + job.rounds)][warm:]
    tokens = [sum(map(simulation.count_training_tokens, one.groups)) for one in counted]
    if streams:
        after = [one.after for one in counted]
    else:
        after = [
            (_count_reward_seconds(one, overlaps), job.seconds_per_token * count / nodes)
            for one, count in zip(counted, tokens, strict=True)
        ]
    return Stages(
        rollout=mean(one.seconds for one in counted),
        reward=mean(waiting for waiting, _ in after),
        training=mean(training for _, training in after),
        hidden=mean(one.hidden for one in counted),
        lent=mean(one.lent for one in counted),
        tokens=mean(tokens),
    )


def _count_reward_seconds(found: SimulatedRound, overlaps: bool) -> float:
    """Seconds from the end of the rollout to the last reward."""
    if not overlaps:
        return max(took for _, took in found.rewards)
    return max(max(end + took for end, took in found.rewards) - found.seconds, 0.0)


def measure_training(rounds: int, seeds: Sequence[int]) -> dict[str, float]:
    """Seconds of training a token on all ranks of a node, by setting: for the 14B from the paper's shares, for the
    others by parameters."""
    plain = [simulate(StepJob(MEASURED, "plain", rounds, seed, 0.0)) for seed in seeds]
    nodes = MEASURED.gpus // 8
    base = TRAINING_SHARE * nodes * mean(one.rollout for one in plain) / mean(one.tokens for one in plain)
    return {setting.name: base * PARAMETERS[setting.name] / PARAMETERS[MEASURED.name] for setting in SETTINGS}


Found = dict[str, dict[str, list[Stages]]]
"""Stages by setting and row, one entry a seed."""


def simulate_all(rounds: int, seeds: Sequence[int], jobs: int | None) -> Found:
    per_token = measure_training(rounds, seeds)
    plan = [
        StepJob(setting, row, rounds, seed, per_token[setting.name]) for setting in SETTINGS for row in ROWS
        for seed in seeds
    ]  # fmt: skip
    with ProcessPoolExecutor(jobs) as pool:
        done = list(track(pool.map(simulate, plan), "rows", len(plan), console=Console(stderr=True)))
    stages_by_row: Found = {}
    for job, stages in zip(plan, done, strict=True):
        stages_by_row.setdefault(job.setting.name, {}).setdefault(job.row, []).append(stages)
    return stages_by_row


def list_rows(found: Found) -> list[tuple[str, ...]]:
    """The cells of the page's table, a line each: means over the seeds; how many times as fast with the least and the
    largest seed, each against ``plain`` of its own."""
    lines = []
    for setting, rows in found.items():
        for place, (row, runs) in enumerate(rows.items()):
            stages = (mean(getattr(one, name) for one in runs) for name in COLUMNS)
            gains = [plain.seconds / one.seconds for plain, one in zip(rows["plain"], runs, strict=True)]
            gain = sum(one.seconds for one in rows["plain"]) / sum(one.seconds for one in runs)
            spread = f"{gain:.2f} ({pictures.format_span(gains)})" if place else "1.00"
            lines.append((setting, row, *(f"{one:.1f}" for one in stages), spread, f"{REPORTED[setting][place]:.2f}"))
    return lines


COLUMNS = ("rollout", "reward", "training", "hidden", "seconds")
HEADS = ("setting", "with", "rollout, s", "reward, s", "training, s", "hidden, s", "step, s", "times as fast", "paper")


def format_table(found: Found) -> Table:
    table = Table(title="a step by stage, cumulative (simulated)", title_justify="left")
    for head in HEADS:
        table.add_column(head, justify="right")
    for line in list_rows(found):
        table.add_row(*line)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m studies.rl_step",
        description="A training step by stage, with one technique after the other (simulated).",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps with {QUICK_SEEDS} seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"of lengths and rewards: 1 to N (default {SEEDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them here")
    args = parser.parse_args(argv)
    if args.seeds is not None and args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds}: must be at least 1")
    steps, seeds = (QUICK_STEPS, QUICK_SEEDS) if args.quick else (STEPS, SEEDS)
    stages = simulate_all(steps, range(1, (args.seeds or seeds) + 1), args.jobs)
    Console(width=160, highlight=False).print(format_table(stages))
    if args.json:
        written = {
            setting: {row: [asdict(one) for one in runs] for row, runs in rows.items()}
            for setting, rows in stages.items()
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    if args.png:
        step_picture.draw(
            step_picture.read_lines([dict(zip(HEADS, line, strict=True)) for line in list_rows(stages)]), "", args.png
        )
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.rl_step", main))
