"""Scheduler steps → step times.  Pure functions of ``Engine.trace()``.

A step is a dict: ``rank`` (the leader), ``tp``, ``kind`` (``decode`` or ``prefill``), ``at`` (seconds at which it
ended, one clock for all ranks), ``seconds``, ``requests`` and ``tokens`` of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from statistics import mean, median
from typing import Any

WINDOWS, WINDOW = 3, 20
"""The steps of one run are cut into so many windows of at most so many steps: one that was disturbed is outvoted."""

Step = dict[str, Any]


@dataclass(frozen=True)
class Windows:
    """One run: mean step time (seconds) of each window, mean context (tokens of a request), steps in a window."""

    samples: tuple[float, ...]
    context: float
    size: int


def by_rank(trace: list[Step], **wanted: Any) -> dict[int, list[Step]]:
    """Steps of each leader in the order of time, those that match ``wanted`` only."""
    steps = [step for step in trace if all(step[name] == value for name, value in wanted.items())]
    steps.sort(key=lambda step: (step["rank"], step["at"]))
    return {rank: list(group) for rank, group in groupby(steps, key=lambda step: step["rank"])}


def decode_windows(trace: list[Step], *, tp: int, replicas: int, batch: int, warm_up: int, most: int) -> Windows | None:
    """Step times while exactly ``replicas`` replicas decoded ``batch`` requests each; None if they hardly did.

    ``most``: steps to use of each replica at most.  With several replicas only the time counts in which all of them
    had their full batch; alone, only that in which no other leader took a step.
    """
    full = by_rank(trace, kind="decode", tp=tp, requests=batch)
    if replicas == 1 and full:
        lone = max(full, key=lambda rank: full[rank][-1]["at"])
        others = [step["at"] for step in trace if step["rank"] != lone]
        full = {lone: [step for step in full[lone] if step["at"] - step["seconds"] >= max(others, default=0.0)]}
    if len(full) != replicas or any(len(steps) <= warm_up for steps in full.values()):
        return None
    begin = max(steps[warm_up]["at"] - steps[warm_up]["seconds"] for steps in full.values())
    end = min(steps[-1]["at"] for steps in full.values())
    kept = [
        [step for step in steps if begin <= step["at"] - step["seconds"] + 1e-9 and step["at"] <= end][:most]
        for steps in full.values()
    ]
    usable = min(map(len, kept))
    if usable < 1:
        return None
    count = min(WINDOWS, max(1, usable // 8))
    size = min(WINDOW, usable // count)
    samples = tuple(
        mean(mean(step["seconds"] for step in steps[i * size : (i + 1) * size]) for steps in kept) for i in range(count)
    )
    context = mean(step["tokens"] / batch for steps in kept for step in steps[: count * size])
    return Windows(samples, context, size)


def prefill_seconds(
    trace: list[Step], *, tp: int, replicas: int, batch: int, length: int, plug: int = 0
) -> tuple[float, bool] | None:
    """Time to prefill ``batch`` requests of ``length`` tokens on each replica, and whether they were together.

    With ``plug`` tokens, one other request goes ahead and keeps the scheduler busy while the rest arrive.  Together:
    the first of them did not start alone, nor with the plug; else the seconds are their share by tokens of the whole
    time.  Mean over replicas; None if not every replica got its share.
    """
    found = by_rank(trace, kind="prefill", tp=tp)
    if len(found) != replicas:
        return None
    seconds, together = [], True
    for steps in found.values():
        total = sum(step["tokens"] for step in steps)
        if not 0.9 * batch * length - batch <= total - plug <= 1.1 * batch * length + batch:
            return None
        ahead = 1 if plug else 0
        plug_alone = not plug or (steps[0]["requests"] == 1 and abs(steps[0]["tokens"] - plug) <= 4)
        mine = steps[ahead:]
        first_alone = len(mine) > 1 and mine[0]["requests"] == 1 and abs(mine[0]["tokens"] - length) <= 4
        if plug_alone and mine and not first_alone:
            seconds.append(sum(step["seconds"] for step in mine))
        else:
            together = False
            seconds.append(sum(step["seconds"] for step in steps) * batch * length / total)
    return mean(seconds), together


def spread(samples: tuple[float, ...]) -> float:
    """(largest - smallest) / median."""
    return (max(samples) - min(samples)) / median(samples) if samples else 0.0
