"""A run as stretches of time: which layout was in force, which ranks had work, how many requests were left."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pat.demo.records import Run, degrees


@dataclass(frozen=True)
class Band:
    """``layout`` was in force from ``start`` to ``end``."""

    start: float
    end: float
    layout: str


@dataclass(frozen=True)
class Lane:
    """These ranks, all of one replica, had requests (``busy``) or none from ``start`` to ``end``."""

    start: float
    end: float
    layout: str
    ranks: tuple[int, ...]
    busy: bool


def bands(run: Run) -> list[Band]:
    """Layouts in their order; a pause belongs to the layout before it."""
    found, layout, since = [], run.layout, 0.0
    for switch in run.switches:
        now = min(switch.at + switch.pause, run.seconds)
        if not switch.error and now > since:
            found.append(Band(since, now, layout))
            layout, since = switch.after, now
    if run.seconds > since:
        found.append(Band(since, run.seconds, layout))
    return found


def lanes(run: Run) -> list[Lane]:
    """What every replica did, to the grain of the samples.

    A replica is idle from the first sample on after which no sample finds it with requests.
    """
    found = []
    for band in bands(run):
        tp, dp = degrees(band.layout)
        for replica in range(dp):
            inside = [s for s in run.samples if band.start <= s.at <= band.end and s.layout == band.layout]
            last = max((s.at for s in inside if s.loads[replica]), default=band.start)
            later = [s.at for s in inside if s.at > last]
            idle_from = later[0] if later else band.end
            ranks = tuple(range(replica, tp * dp, dp))
            for start, end, busy in ((band.start, idle_from, True), (idle_from, band.end, False)):
                if end > start:
                    found.append(Lane(start, end, band.layout, ranks, busy))
    return found


def left(run: Run, start: float, end: float) -> tuple[list[float], list[int]]:
    """Corners of the step curve of requests left between two times: times, and the count from each on."""
    ends = sorted(answer.end for answer in run.answers)
    inside = [at for at in ends if start < at < end]
    before = sum(at > start for at in ends)
    times = [start, *inside, end]
    counts = [before - i for i in range(len(inside) + 1)]
    return times, [*counts, counts[-1]]
