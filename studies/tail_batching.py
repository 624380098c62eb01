"""Tail batching, simulated in RollPacker's settings.  ``bench/tail_rounds.py`` makes real rounds.

    python -m studies.tail_batching [--quick] [--jobs N] [--json FILE] [--png FILE]

The admitter itself on an engine whose step times come from a profile (``rounds.py``); response lengths are drawn, those
to one prompt with correlation ρ.  No machine matters; the same seeds give the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.policies.registry import make_policy
from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import load
from sglang_pat.rollout.rules import Rules
from studies import PROFILES, tail_picture
from studies.rounds import Engines, Simulation
from studies.shapes import parse_shape

CORRELATIONS = (0.0, 0.5, 0.8)
ETAS = (1.0, 1.125, 1.25, 1.375, 1.5)
ROLLOUT_SHARE = 0.71
"""Rollout's share of a training step without tail batching (RollPacker Table 1: 72, 66 and 71%)."""

BOUND = 8
"""Bound on deferrals, where there is one (the default of a job's rules)."""


@dataclass(frozen=True)
class PaperSetting:
    """One of RollPacker's (section 6.1), on the profile that is nearest to it.

    Attributes:
        gpus, tp: as there.
        cap: most tokens of a response; the body of lengths is that of Fig. 2.
        reported: speed-up of a training step by tail batching (Table 2).
    """

    name: str
    profile: str
    gpus: int
    tp: int
    cap: int
    reported: float
    slower: float = 1.0
    """Step times over those of the profile, for a model that has none."""

    @property
    def compute_lengths(self) -> str:
        return f"body-atom:6.363,0.70,{self.cap},0.01"


SETTINGS = (
    PaperSetting("7B, 8K", "8xH100-llama3.1-8b", 16, 1, 8192, 1.30),
    PaperSetting("14B, 16K", "8xH100-qwen3-14b", 32, 2, 16384, 1.48),
    PaperSetting("32B, 32K", "8xH100-qwen3-14b", 64, 2, 32768, 2.21, slower=32.5 / 14.8),
)


@dataclass(frozen=True)
class RoundsJob:
    """One simulation, in which ``rounds`` rounds count, after some that fill the queue."""

    setting: PaperSetting
    rho: float
    mode: str
    eta_prompts: float
    eta_responses: float
    rounds: int
    num_prompts: int = 128
    nodes: int | None = None
    adaptive: bool = False
    unbiased: bool = False
    shape: str | None = None
    """Shape of the lengths; None: the setting's."""
    max_deferrals: int = 64
    """Bound so high that nothing is ever forced; the paper has none."""


class Slower:
    """A predictor whose steps all take ``factor`` times as long."""

    def __init__(self, predictor, factor: float) -> None:
        self._predictor, self._factor = predictor, factor

    def step_seconds(self, *args, **kwargs):
        return self._factor * self._predictor.step_seconds(*args, **kwargs)


def simulate(job: RoundsJob) -> dict:
    """Mean seconds of a round, rounds by kind, switches a round, tokens thrown away over all, tokens returned a s."""
    setting = job.setting
    profile = load(PROFILES / f"{setting.profile}.json", complete=True)
    predictor, costs = build_predictors(profile)
    policy = make_policy("survival", predictor=predictor, costs=costs) if job.adaptive else None
    nodes = job.nodes or setting.gpus // profile.fingerprint.num_ranks
    engines = Engines(
        predictor=Slower(predictor, setting.slower) if setting.slower != 1 else predictor, costs=costs,
        fingerprint=profile.fingerprint, nodes=nodes, tp=setting.tp, policy=policy,
    )  # fmt: skip
    rules = Rules(
        mode=job.mode, num_prompts=job.num_prompts, num_responses=8, eta_prompts=job.eta_prompts,
        eta_responses=job.eta_responses, max_deferrals=job.max_deferrals, unbiased=job.unbiased,
    )  # fmt: skip
    simulation = Simulation(engines, rules, parse_shape(job.shape or setting.compute_lengths), job.rho, seed=1)
    warm = min(8, job.rounds // 4)
    rounds = [simulation.run_round(version) for version in range(warm + job.rounds)][warm:]
    kinds = [found.summary.kind for found in rounds]
    kept = sum(sum(found.summary.kept_lengths) for found in rounds)
    thrown = sum(found.summary.thrown for found in rounds)
    return {
        "seconds": mean(found.seconds for found in rounds),
        "short": kinds.count("short"), "long": kinds.count("long"),
        "short_seconds": mean([f.seconds for f in rounds if f.summary.kind == "short"] or [float("nan")]),
        "long_seconds": mean([f.seconds for f in rounds if f.summary.kind == "long"] or [float("nan")]),
        "switches": mean(found.switches for found in rounds),
        "thrown": thrown / (thrown + kept),
        "returned": kept / sum(found.seconds for found in rounds),
    }  # fmt: skip


def step_speedup(rollout: float) -> float:
    """Speed-up of a whole training step, if only its rollout becomes ``rollout`` times as fast."""
    return 1 / (1 - ROLLOUT_SHARE + ROLLOUT_SHARE / rollout)


def reorder_by_arithmetic(batches: int = 100, slow: float = 120.0, usual: float = 30.0) -> tuple[float, float]:
    """Seconds of all batches in the example of verl's recipe, before and after: each batch has one slow sample; then
    all slow samples are put off into one batch, the last."""
    return batches * slow, (batches - 1) * usual + slow


WAYS = {
    "plain": (1.0, 1.0, False),
    "default": (1.25, 1.0, False),
    "as in the paper": (1.25, 1.25, False),
    "unbiased": (1.25, 1.0, True),
}
"""Ways to be compared for each distribution of lengths: η_P, η_R, whether ``unbiased``."""


def list_length_shapes(middle: PaperSetting) -> dict[str, str]:
    """Shapes of lengths, by name: what tail batching gains depends on them more than on all else."""
    return {
        "RollPacker": middle.compute_lengths,
        "RollPacker, 5% at the cap": middle.compute_lengths.replace(",0.01", ",0.05"),
        "DeepScaleR": "deepscaler",
    }


def plan_simulations(rounds: int, settings: tuple[PaperSetting, ...], middle: PaperSetting) -> dict[tuple, RoundsJob]:
    """All simulations, by what they are for."""
    plan: dict[tuple, RoundsJob] = {}
    for setting in settings:
        for rho in CORRELATIONS:
            plan["base", setting.name, rho] = RoundsJob(setting, rho, "strict", 1.0, 1.0, rounds)
            plan["strict", setting.name, rho] = RoundsJob(setting, rho, "strict", 1.25, 1.25, rounds)
            for name, bound in (("reorder", BOUND), ("reorder, unforced", RoundsJob.max_deferrals)):
                job = RoundsJob(setting, rho, "reorder", 1.25, 1.0, rounds, max_deferrals=bound)
                plan[name, setting.name, rho] = job
            # Adaptive TP works on one node: a node's share of the batch.
            share = dict(num_prompts=8 * 128 // setting.gpus, nodes=1)
            for name, eta in (("base", 1.0), ("strict", 1.25)):
                for adaptive in (False, True):
                    key = f"{name} on a node{', adaptive' if adaptive else ''}"
                    job = RoundsJob(setting, rho, "strict", eta, eta, rounds, **share, adaptive=adaptive)
                    plan[key, setting.name, rho] = job
    for rho in CORRELATIONS:
        for eta in ETAS[1:]:
            plan["prompts", eta, rho] = RoundsJob(middle, rho, "strict", eta, 1.0, rounds)
            plan["responses", eta, rho] = RoundsJob(middle, rho, "strict", 1.0, eta, rounds)
            plan["both", eta, rho] = RoundsJob(middle, rho, "strict", eta, eta, rounds)
        bounded = dict(num_prompts=64, nodes=4, max_deferrals=BOUND)
        for lengths, shape in list_length_shapes(middle).items():
            for way, (eta_p, eta_r, unbiased) in WAYS.items():
                job = RoundsJob(middle, rho, "strict", eta_p, eta_r, rounds, unbiased=unbiased, shape=shape, **bounded)
                plan[way, lengths, rho] = job
        for mode, eta_p, eta_r in (("base", 1.0, 1.0), ("strict", 1.25, 1.25), ("reorder", 1.25, 1.0)):
            job = RoundsJob(middle, rho, "strict" if mode == "base" else mode, eta_p, eta_r, rounds, **bounded)
            plan[f"{mode}, bounded", middle.name, rho] = job
    return plan


def replay(rounds: int, settings: tuple[PaperSetting, ...], jobs: int) -> dict:
    """What comes of all that is planned."""
    middle = settings[min(1, len(settings) - 1)]
    plan = plan_simulations(rounds, settings, middle)
    with ProcessPoolExecutor(jobs) as pool:
        figures = dict(zip(plan, track(pool.map(simulate, plan.values()), "replay", len(plan)), strict=True))
    return {"settings": settings, "middle": middle, "found": figures}


def show_replay(console: Console, result: dict) -> None:
    figures, middle = result["found"], result["middle"]
    table = Table(title="RollPacker's settings, P0 = 128, R0 = 8, eta = 1.25 (simulated)", title_justify="left")
    for column in (
        "setting", "rho", "base, s", "tail batching, s", "rollout", "a step", "reported", "short : long",
        "short, s", "long, s", "thrown", "reorder", "bound 64",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for setting in result["settings"]:
        for rho in CORRELATIONS:
            base, tail = figures["base", setting.name, rho], figures["strict", setting.name, rho]
            gain = base["seconds"] / tail["seconds"]
            table.add_row(
                setting.name, f"{rho}", f"{base['seconds']:.0f}", f"{tail['seconds']:.0f}", f"{gain:.2f}",
                f"{step_speedup(gain):.2f}", f"{setting.reported:.2f}",
                f"{tail['short'] / max(tail['long'], 1):.1f}", f"{tail['short_seconds']:.0f}",
                f"{tail['long_seconds']:.0f}", f"{tail['thrown']:.0%}",
                *(f"{base['seconds'] / figures[name, setting.name, rho]['seconds']:.2f}"
                  for name in ("reorder", "reorder, unforced")),
            )  # fmt: skip
    console.print(table)
    table = Table(title="by lengths, P0 = 64 (simulated): as fast; tokens returned a second", title_justify="left")
    for column in ("lengths", "rho", "plain, s", *(way for way in WAYS if way != "plain")):
        table.add_column(column, justify="right")
    for lengths in list_length_shapes(middle):
        for rho in CORRELATIONS:
            base, *others = (figures[way, lengths, rho] for way in WAYS)
            gains = [(base["seconds"] / one["seconds"], one["returned"] / base["returned"]) for one in others]
            table.add_row(lengths, f"{rho}", f"{base['seconds']:.0f}", *(f"{a:.2f}; {b:.2f}" for a, b in gains))
    console.print(table)
    table = Table(title=f"over-provisioning, {middle.name}: base over it, rollout (simulated)", title_justify="left")
    for column in ("of", *(f"eta {eta}, rho {rho}" for eta in ETAS[1:] for rho in CORRELATIONS)):
        table.add_column(column, justify="right")
    for of in ("prompts", "responses", "both"):
        base = {rho: figures["base", middle.name, rho]["seconds"] for rho in CORRELATIONS}
        cells = [f"{base[rho] / figures[of, eta, rho]['seconds']:.2f}" for eta in ETAS[1:] for rho in CORRELATIONS]
        table.add_row(of, *cells)
    console.print(table)
    table = Table(title=f"at most {BOUND} deferrals, {middle.name}, P0 = 64, R0 = 8 (simulated)", title_justify="left")
    for column in ("mode", "rho", "base, s", "a round, s", "rollout", "short, long", "thrown"):
        table.add_column(column, justify="right")
    for mode in ("strict", "reorder"):
        for rho in CORRELATIONS:
            base, one = figures["base, bounded", middle.name, rho], figures[f"{mode}, bounded", middle.name, rho]
            table.add_row(
                mode, f"{rho}", f"{base['seconds']:.1f}", f"{one['seconds']:.1f}",
                f"{base['seconds'] / one['seconds']:.2f}", f"{one['short']}, {one['long']}", f"{one['thrown']:.0%}",
            )  # fmt: skip
    console.print(table)
    table = Table(title="a node's share, and adaptive TP on top (simulated): seconds a round", title_justify="left")
    for column in ("setting", "rho", "base", "base, adaptive", "tail batching", "both", "gain of both", "switches"):
        table.add_column(column, justify="right")
    for setting in result["settings"]:
        for rho in CORRELATIONS:
            names = [f"{name} on a node{more}" for name in ("base", "strict") for more in ("", ", adaptive")]
            cells = [figures[name, setting.name, rho] for name in names]
            table.add_row(
                setting.name, f"{rho}", *(f"{cell['seconds']:.0f}" for cell in cells),
                f"{cells[0]['seconds'] / cells[3]['seconds']:.2f}", f"{cells[3]['switches']:.1f}",
            )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and settings")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw them here")
    args = parser.parse_args()
    before, after = reorder_by_arithmetic()
    console = Console(width=170)
    console.print(
        f"reorder, the recipe's example by arithmetic: {before:,.0f} -> {after:,.0f} s, {before / after:.1f} times"
    )
    result = replay(6 if args.quick else 40, SETTINGS[1:2] if args.quick else SETTINGS, args.jobs)
    show_replay(console, result)
    if args.json:
        written = {" / ".join(map(str, key)): value for key, value in result["found"].items()}
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    if args.png:
        tail_picture.draw(tail_picture.make_found(result["found"]), "", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
