"""Scheduler steps → step times.  Pure functions of ``Engine.trace()``.

A step is a dict: ``rank`` (the leader), ``tp``, ``kind`` (``decode`` or ``prefill``), ``at`` (seconds at which it
ended, one clock for all ranks), ``seconds``, ``requests`` and ``tokens`` of its batch.
"""

from __future__ import annotations

from itertools import groupby
from statistics import mean
from typing import Any

from profiler.grid import LEAST_STEPS, STEPS, WARM_UP

WINDOWS = 3
"""Number of windows into which the steps of one run are cut, where there are enough: one that was disturbed is
outvoted."""

Step = dict[str, Any]


def group_by_rank(trace: list[Step], **fields: Any) -> dict[int, list[Step]]:
    """Steps of each leader in the order of time, those that match ``fields`` only."""
    steps = [step for step in trace if all(step[name] == value for name, value in fields.items())]
    steps.sort(key=lambda step: (step["rank"], step["at"]))
    return {rank: list(group) for rank, group in groupby(steps, key=lambda step: step["rank"])}


def decode_windows(
    trace: list[Step], *, tp: int, replicas: int, batch: int, most: int = STEPS
) -> tuple[tuple[float, ...], float] | None:
    """Mean step time (seconds) of each window while exactly ``replicas`` replicas decoded ``batch`` requests each, and
    the mean context (tokens of a request); None if they hardly did.

    ``most``: steps to use of each replica at most.  With several replicas only the time counts in which all of them
    had their full batch; alone, only that in which no other leader took a step.
    """
    full = group_by_rank(trace, kind="decode", tp=tp, requests=batch)
    if replicas == 1 and full:
        lone = max(full, key=lambda rank: full[rank][-1]["at"])
        others = [step["at"] for step in trace if step["rank"] != lone]
        full = {lone: [step for step in full[lone] if step["at"] - step["seconds"] >= max(others, default=0.0)]}
    if len(full) != replicas or any(len(steps) <= WARM_UP for steps in full.values()):
        return None
    begin = max(steps[WARM_UP]["at"] - steps[WARM_UP]["seconds"] for steps in full.values())
    end = min(steps[-1]["at"] for steps in full.values())
    kept = [
        [step for step in steps if begin <= step["at"] - step["seconds"] + 1e-9 and step["at"] <= end][:most]
        for steps in full.values()
    ]
    usable = min(map(len, kept))
    if usable < LEAST_STEPS:
        return None
    count = min(WINDOWS, usable // LEAST_STEPS)
    size = usable // count
    samples = tuple(
        mean(mean(step["seconds"] for step in steps[i * size : (i + 1) * size]) for steps in kept) for i in range(count)
    )
    context = mean(step["tokens"] / batch for steps in kept for step in steps[: count * size])
    return samples, context


def measure_prefill_seconds(trace: list[Step], *, tp: int, replicas: int, batch: int, length: int) -> float | None:
    """Time to prefill ``batch`` requests of ``length`` tokens on each replica, in however many steps; mean over
    replicas, None if not every replica got its share."""
    steps_by_rank = group_by_rank(trace, kind="prefill", tp=tp)
    work = {rank: sum(step["tokens"] for step in steps) for rank, steps in steps_by_rank.items()}
    even = all(0.9 * batch * length - batch <= tokens <= 1.1 * batch * length + batch for tokens in work.values())
    if len(steps_by_rank) != replicas or not even:
        return None
    return mean(sum(step["seconds"] for step in steps) for steps in steps_by_rank.values())
