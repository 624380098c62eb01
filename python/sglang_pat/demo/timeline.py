"""A run → what its picture shows: spans of time, without a thought of ink. Times are seconds of the run."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pat.demo.records import Answer, Run


@dataclass(frozen=True)
class Band:
    """The engine was in ``layout`` from ``start`` to ``end``."""

    start: float
    end: float
    layout: str

    @property
    def merged(self) -> bool:
        return self.layout.endswith("dp1")


@dataclass(frozen=True)
class Lane:
    """``group`` of the layout, made of ``ranks``, from ``start`` to ``end``; ``busy``: it had requests."""

    start: float
    end: float
    layout: str
    group: int
    ranks: tuple[int, ...]
    busy: bool


@dataclass(frozen=True)
class Bar:
    """A stretch of one request's life: ``what`` is ``wait`` (for the first token) or a layout.

    ``row`` 0 is the request that ended last.
    """

    row: int
    start: float
    end: float
    what: str
    group: int | None


def bands(run: Run, until: float) -> list[Band]:
    """Layouts in their order; a pause belongs to the layout before it."""
    found, layout, since = [], run.base, 0.0
    for switch in run.switches:
        now = min(switch.at + switch.pause, until)
        if not switch.error and now > since:
            found.append(Band(since, now, layout))
            layout, since = switch.after, now
    if until > since:
        found.append(Band(since, until, layout))
    return found


def lanes(run: Run, until: float) -> list[Lane]:
    """What every group did: two lanes of one rank each, or one lane of both.

    A group counts as busy until the last of its requests has ended. One of unknown group counts for all.
    """
    found = []
    for band in bands(run, until):
        tp, dp = degrees(band.layout)
        for group in range(dp):
            mine = [a.last for a in run.answers if dp == 1 or a.group in (group, None)]
            ranks = tuple(range(group, tp * dp, dp))
            idle_from = min(max([band.start, *mine]), band.end)
            for start, end, busy in ((band.start, idle_from, True), (idle_from, band.end, False)):
                if end > start:
                    found.append(Lane(start, end, band.layout, group, ranks, busy))
    return found


def bars(run: Run) -> list[Bar]:
    """The requests' lives, cut where the layout changed; the longest at the bottom."""
    found = []
    spans = bands(run, run.wall)
    for row, answer in enumerate(order(run)):
        found.append(Bar(row, answer.sent, answer.first, "wait", answer.group))
        for band in spans:
            start, end = max(answer.first, band.start), min(answer.last, band.end)
            if end > start:
                group = 0 if band.merged else answer.group
                found.append(Bar(row, start, end, band.layout, group))
    return found


def order(run: Run) -> list[Answer]:
    """By end, last first: then the bars' right ends trace the number of running requests."""
    return sorted(run.answers, key=lambda answer: -answer.last)


def running(run: Run) -> tuple[list[float], list[int]]:
    """Corners of the step curve of requests sent and not yet complete: times, and the count from each on."""
    events = sorted([(a.sent, 1) for a in run.answers] + [(a.last, -1) for a in run.answers])
    times, counts, count = [0.0], [0], 0
    for at, change in events:
        count += change
        if at == times[-1]:
            counts[-1] = count
        else:
            times.append(at)
            counts.append(count)
    return times, counts


def degrees(layout: str) -> tuple[int, int]:
    """``tp1×dp2`` → (1, 2)."""
    tp, dp = layout.removeprefix("tp").split("×dp")
    return int(tp), int(dp)
