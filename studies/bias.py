"""What tail batching does to the lengths of what is returned, and what it costs to undo it (simulated).

    python -m studies.bias [--quick] [--epochs N] [--jobs N] [--json FILE]

Whole epochs of 1,280 prompts with 8 responses each, RollPacker's 14B with 16K tokens (see ``tail_batching.py``): the
admitter itself on simulated engines.  Lengths are drawn, those to one prompt with correlation ρ.  What is returned is
compared with what the same prompts give on average if nothing is thrown away.  The same seeds give the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import ndtri

from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import load
from sglang_pat.rollout import redraws
from sglang_pat.rollout.records import Group
from sglang_pat.rollout.rules import Rules
from studies import PROFILES
from studies.rounds import Engines, SimulatedRound, Simulation
from studies.shapes import Shape, parse_shape
from studies.tail_batching import CORRELATIONS, SETTINGS

SETTING = SETTINGS[1]
PROMPTS, SIZE, RESPONSES = 1280, 128, 8
WAYS = {
    "no tail batching": {"eta_prompts": 1.0, "eta_responses": 1.0},
    "strict (default)": {},
    "strict, η_R = 1.25": {"eta_responses": 1.25},
    "reorder": {"mode": "reorder"},
    "partial": {"mode": "partial"},
    "unbiased": {"unbiased": True},
    "unbiased, one by one": {"unbiased": True},
    "unbiased, five at once": {"unbiased": True},
}
SCHEDULES: dict[str, Callable[[int], int]] = {
    "unbiased, one by one": lambda rejected: 1,
    "unbiased, five at once": lambda rejected: min(5, redraws.MOST - rejected),
}
WEIGHED = "strict (default)"


@dataclass(frozen=True)
class EpochJob:
    """One epoch."""

    way: str
    rho: float
    seed: int
    prompts: int


def simulate(job: EpochJob) -> dict[str, dict[str, float]]:
    """Figures of one epoch, and its truth; by way: inverse-probability weights are ways of their own."""
    profile = load(PROFILES / f"{SETTING.profile}.json")
    predictor, costs = build_predictors(profile)
    engines = Engines(
        predictor=predictor, costs=costs, fingerprint=profile.fingerprint, tp=SETTING.tp,
        nodes=SETTING.gpus // profile.fingerprint.num_ranks,
    )  # fmt: skip
    rules = Rules(num_prompts=SIZE, num_responses=RESPONSES, **WAYS[job.way])
    shape = parse_shape(SETTING.compute_lengths)
    simulation = Simulation(engines, rules, shape, job.rho, job.seed, prompts=job.prompts)
    with patch.object(redraws, "choose_sample_count", SCHEDULES.get(job.way, redraws.choose_sample_count)):
        rounds = simulation.run_epoch()
    lengths = np.array([found for round_ in rounds for found in round_.summary.kept_lengths])
    true_mean, true_cap = compute_truth(shape, job)
    tokens, last = int(lengths.sum()), rounds[-1].summary
    figures = {
        "true_mean": true_mean, "true_cap": true_cap, "seconds": sum(found.seconds for found in rounds),
        "tokens": (tokens + sum(found.summary.thrown for found in rounds)) / tokens,
        "redraws": sum(found.summary.redraws for found in rounds),
        "deferred": sum(bool(group.floors) for found in rounds for group in found.groups),
        "gave_up": sum(found.summary.gave_up for found in rounds),
    }  # fmt: skip
    estimated = {
        "estimated": last.mean_returned / last.mean_undropped - 1,
        "by_chance": last.mean_undropped_error / last.mean_undropped,
        "plain": last.plain_seconds * len(rounds),
    }
    result = {job.way: figures | estimated | summarize_weighted(lengths, np.ones(len(lengths)))}
    if job.way == WEIGHED:
        for name, weights in inverse_probability(rounds).items():
            result[name] = figures | summarize_weighted(lengths, np.repeat(weights, RESPONSES))
    return result


def summarize_weighted(lengths: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Mean and share at the cap; ``effective``: sample size over the number of responses."""
    return {
        "mean": float(np.average(lengths, weights=weights)),
        "cap": float(np.average(lengths >= SETTING.cap, weights=weights)),
        "effective": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def compute_truth(shape: Shape, job: EpochJob, points: int = 2000) -> tuple[float, float]:
    """Mean length and share at the cap of an epoch's prompts, over all that they might answer."""
    own = ndtri((np.arange(points) + 0.5) / points)
    common = np.array([np.random.default_rng((job.seed, 2, index)).normal() for index in range(job.prompts)])
    lengths = shape.sample_correlated_lengths(common[:, None], own, job.rho)
    return float(lengths.mean()), float((lengths >= shape.limit).mean())


def inverse_probability(rounds: list[SimulatedRound]) -> dict[str, np.ndarray]:
    """Weights of the returned groups: 1/(1 + S) and 1/S, with S of all prompts and with S of each, shrunk."""
    short = {id(group) for found in rounds if found.summary.kind == "short" for group in found.groups}
    groups = [group for found in rounds for group in found.groups]
    began = [group for group in groups if id(group) in short or group.floors]
    deferred = [group for group in began if group.floors]
    pooled = len(deferred) / len(began)
    again = sum(outlives(group) for group in deferred) / len(deferred)
    # Of a Beta distribution of S with this mean and this E[S²] / E[S].
    strength = max((1 - again) / max(again - pooled, 1e-6), 1e-6)

    def shrunk(group: Group) -> float:
        seen, times = (1 + outlives(group), 2) if group.floors else (0, 1)
        return (strength * pooled + seen) / (strength + times)

    def weights(chance: Callable[[Group], float]) -> np.ndarray:
        values = []
        for group in groups:
            if id(group) not in short and not group.floors:
                values.append(1.0)  # fills up a long round: nothing was thrown away
            else:
                values.append(1 / chance(group) if outlives(group) else 1 / (1 + chance(group)))
        return np.array(values)

    return {"weights, S of all": weights(lambda group: pooled), "weights, S of each": weights(shrunk)}


def outlives(group: Group) -> bool:
    """Whether a returned group was deferred, and would have been again."""
    longer = any(sample.output.tokens > redraws.floor(group, sample.number) for sample in group.list_kept())
    return bool(group.floors) and longer


def combine_epochs(found: list[dict[str, float]]) -> dict[str, float]:
    """Means over epochs with one way and one ρ; ``bias``: of the mean, over the truth, with its standard error.

    ``estimated``: the bias of the mean as the last round's summary has it, which knows no truth.
    """
    biases = [one["mean"] / one["true_mean"] - 1 for one in found]
    total = {name: mean(one[name] for one in found) for name in found[0]}
    return total | {
        "bias": mean(biases), "error": stdev(biases) / len(biases) ** 0.5 if len(biases) > 1 else float("nan"),
        "at_cap": total["cap"] / total["true_cap"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two epochs of 640 prompts, one ρ")
    parser.add_argument("--epochs", type=int, default=8, help="of each way and ρ (default: 8)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args()
    rhos, epochs, prompts = ((0.5,), 2, PROMPTS // 2) if args.quick else (CORRELATIONS, args.epochs, PROMPTS)
    plan = [EpochJob(way, rho, seed, prompts) for rho in rhos for seed in range(epochs) for way in WAYS]
    by: dict[tuple[float, str], list[dict[str, float]]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for job, epoch in zip(plan, track(pool.map(simulate, plan), "epochs", len(plan)), strict=True):
            for way, values in epoch.items():
                by.setdefault((job.rho, way), []).append(values)
    table = Table(title=f"{SETTING.name}: returned responses against the truth (simulated)", title_justify="left")
    for column in (
        "rho", "way", "mean", "truth", "bias", "+-", "estimated", "by chance", "at the cap", "seconds", "plain",
        "faster", "returned", "tokens made", "draws a deferred", "gave up", "effective",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "way" else "right")
    written = {}
    for (rho, way), values in by.items():
        one = written[f"{rho} / {way}"] = combine_epochs(values)
        none = combine_epochs(by[rho, "no tail batching"])
        faster = none["seconds"] / one["seconds"]
        table.add_row(
            f"{rho}", way, f"{one['mean']:.0f}", f"{one['true_mean']:.0f}", f"{one['bias']:+.1%}",
            f"{one['error']:.1%}",
            *((f"{one['estimated']:+.1%}", f"{one['by_chance']:.1%}") if "estimated" in one else "--"),
            f"{one['at_cap']:.2f}", f"{one['seconds']:.0f}", f"{one['plain']:.0f}" if "plain" in one else "-",
            f"{faster:.2f}", f"{faster * one['mean'] / none['mean']:.2f}", f"{one['tokens']:.2f}",
            f"{1 + one['redraws'] / one['deferred']:.1f}" if one["deferred"] else "-", f"{one['gave_up']:.1f}",
            f"{one['effective']:.2f}",
        )  # fmt: skip
    Console(width=170).print(table)
    if args.json:
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
