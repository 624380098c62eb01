"""Real decode steps against predicted ones: pure functions of traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np

from profiler.windows import Step, by_rank
from sglang_pat.predict.predictor import Predictor

WINDOW = 20
"""Steps over which errors are also taken, so that what a single step suffers from the machine averages out."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One decode step of one replica.

    Attributes:
        rank: its leader.
        at: seconds at which it ended.
        requests, tokens: of its batch.
        remaining: requests decoding in the whole engine.
        active: replicas at work.
        measured, predicted: seconds.
        covered: whether the profile's grid encloses it.
    """

    rank: int
    at: float
    requests: int
    tokens: int
    remaining: int
    active: int
    measured: float
    predicted: float
    covered: bool


def decoded(trace: list[Step], predictor: Predictor, tp: int) -> list[Decoded]:
    """Every decode step of ``trace`` with its prediction, leader by leader in the order of time."""
    ranks = by_rank(trace, tp=tp)
    ends = {rank: np.array([step["at"] for step in mine]) for rank, mine in ranks.items()}
    steps = []
    for rank, mine in ranks.items():
        others = [(ends[other], theirs) for other, theirs in ranks.items() if other != rank]
        for previous, step in zip([None, *mine], mine, strict=False):
            if step["kind"] != "decode":
                continue
            if previous is not None and previous["kind"] == "decode" and previous["requests"] < step["requests"]:
                continue  # requests joined in a prefill that the bounded trace has lost
            middle = step["at"] - step["seconds"] / 2
            beside = [found for theirs in others if (found := _covering(*theirs, middle)) is not None]
            active = 1 + len(beside)
            requests: int = step["requests"]
            tokens: int = step["tokens"]
            steps.append(
                Decoded(
                    rank=rank,
                    at=step["at"],
                    requests=requests,
                    tokens=tokens,
                    remaining=requests + sum(other["requests"] for other in beside),
                    active=active,
                    measured=step["seconds"],
                    predicted=predictor.step_seconds(tp, requests, tokens, active),
                    covered=predictor.covers(tp, requests, tokens),
                )
            )
    return steps


def _covering(ends: np.ndarray, steps: list[Step], moment: float) -> Step | None:
    """The step under way at ``moment``; ``ends`` are when ``steps`` ended."""
    place = int(np.searchsorted(ends, moment))
    if place < len(steps) and steps[place]["at"] - steps[place]["seconds"] <= moment:
        return steps[place]
    return None


def windows(steps: list[Decoded], size: int = WINDOW) -> list[list[Decoded]]:
    """Runs of ``size`` steps of one leader; a rest shorter than half of it is left out."""
    found: dict[int, list[Decoded]] = {}
    for step in steps:
        found.setdefault(step.rank, []).append(step)
    cut = [mine[i : i + size] for mine in found.values() for i in range(0, len(mine), size)]
    return [window for window in cut if 2 * len(window) >= size]


def error(groups: Iterable[list[Decoded]]) -> float:
    """Mean absolute error of the predicted time of each group, relative to what was measured."""
    return mean(
        abs(sum(s.predicted for s in group) - (time := sum(s.measured for s in group))) / time for group in groups
    )


def _ratios(runs: Iterable[list[Decoded]]) -> list[tuple[float, ...]]:
    """Measured over predicted time of each window in each run of the same trajectory, ``[windows][runs]``.

    Ratios and not times, so that runs whose requests were shared out differently between replicas can be compared.
    """
    of_run = [[sum(s.measured for s in w) / sum(s.predicted for s in w) for w in windows(run)] for run in runs]
    return list(zip(*of_run, strict=False))


def repeat_spread(runs: list[list[Decoded]]) -> float:
    """What the machine itself varies: mean absolute difference between the windows of every two runs."""
    pairs = [pair for ratios in _ratios(runs) for pair in combinations(ratios, 2)]
    return mean(abs(a - b) / ((a + b) / 2) for a, b in pairs)


def slowness(run: list[Decoded]) -> float:
    """Measured over predicted time of a whole run: by how much the machine was slower than during the sweep, provided
    that the profile is right on the whole."""
    return sum(s.measured for s in run) / sum(s.predicted for s in run)


def shape_error(runs: list[list[Decoded]]) -> float:
    """Mean absolute error of the windows with the slowness of each run taken out.

    What the profile gets wrong between batches and contexts, whatever the machine's speed on that day.
    """
    ratios = [(ratio, slowness(run)) for run in runs for (ratio,) in _ratios([run])]
    return mean(abs(slow / ratio - 1) for ratio, slow in ratios)


def own_error(runs: list[list[Decoded]]) -> float:
    """Root mean square of what the profile gets wrong in a window, with each run's slowness and the machine's noise
    taken out.

    The mean of R runs is off by the profile's error and by noise whose variance is the runs' own over R: that much is
    subtracted.  0 where the noise explains everything; as certain as the noise is small.
    """
    table = np.array(_ratios(runs))  # [windows, runs]
    table = table / np.array([slowness(run) for run in runs])
    noise = table.var(axis=1, ddof=1) / table.shape[1]
    return float(np.sqrt(max(0.0, np.mean((table.mean(axis=1) - 1) ** 2 - noise))))


@dataclass(frozen=True, kw_only=True)
class Between:
    """What a profile gets wrong between layouts: this misleads a policy, what is common to all of them does not.

    Attributes:
        common: by how much all layouts are slower than predicted.
        beside: by how much each is slower than that.
        error: standard deviation of ``beside``, with the machine's noise taken out; 0 where that explains all of it.
        noise: standard deviation of ``beside`` that the runs' own differences explain.
    """

    common: float
    beside: dict[str, float]
    error: float
    noise: float


def between_layouts(result: dict[str, list[list[Decoded]]]) -> Between:
    """Layout → its runs, as many of each and in turn: what slows the machine down for a while is common to a turn."""
    logs = np.log([[slowness(run) for run in runs] for runs in result.values()])  # [layouts, runs]
    common = logs.mean(axis=0)
    beside = logs - common
    means, runs, free = beside.mean(axis=1), logs.shape[1], max(len(logs) - 1, 1)
    noise = float((beside.var(axis=1, ddof=1) / runs).sum() / free) if runs > 1 else 0.0
    return Between(
        common=float(np.expm1(common.mean())),
        beside=dict(zip(result, np.expm1(means).tolist(), strict=True)),
        error=float(np.sqrt(max(0.0, (means**2).sum() / free - noise))),
        noise=float(np.sqrt(noise)),
    )


def throughput(steps: list[Decoded]) -> dict[int, tuple[float, float]]:
    """Remaining requests → (measured, predicted) tokens a second of the engine (PAT Fig. 14)."""
    groups: dict[int, list[Decoded]] = {}
    for step in steps:
        groups.setdefault(step.remaining, []).append(step)
    rates = {}
    for remaining, found in groups.items():
        tokens, active = sum(s.requests for s in found), mean(s.active for s in found)
        rates[remaining] = (
            active * tokens / sum(s.measured for s in found),
            active * tokens / sum(s.predicted for s in found),
        )
    return rates


def summary(layout: str, runs: list[list[Decoded]]) -> dict[str, Any]:
    """One row of the result: errors of all runs together, the machine's own spread, what was not covered."""
    steps = [step for run in runs for step in run]
    cut = [window for run in runs for window in windows(run)]
    several = bool(cut) and len(runs) > 1
    return {
        "layout": layout,
        "steps": len(steps),
        "error a step": error([step] for step in steps),
        f"error a window of {WINDOW}": error(cut) if cut else float("nan"),
        "with the run's slowness taken out": shape_error(runs) if cut else float("nan"),
        "and the machine's noise": own_error(runs) if several else float("nan"),
        "slower than the sweep": slowness(steps) - 1,
        "repeat to repeat": repeat_spread(runs) if several else float("nan"),
        "beyond the grid": mean(not s.covered for s in steps),
    }
