"""One pass over the grid with one engine: plan, measure, save, plan again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from profiler import measure
from profiler.budget import RESERVE, Costs, SweepPlan, coverage, seconds_of, steps_for, total, worth
from profiler.display import Display, Progress
from profiler.grid import LEAST_STEPS, Grid, Limits, length_needed
from profiler.measure import NotMeasured
from profiler.points import Point, points
from profiler.rig import Rig
from profiler.store import Store
from profiler.windows import spread
from sglang_pat.predict.profile import MOST_POINTS, DecodePoint, PrefillPoint, SwitchSample
from sglang_pat.tools.commands import UsageError
from sglang_pat.tools.cpu_share import Meter

FIRST_VISIT = 0.5
"""Part of the time in which points are measured first; in the rest they are visited again: a machine changes in minutes
more than a window of steps can show."""
VISITS = 4
WIDE = 0.06
"""Every decode point is visited twice, and up to :data:`VISITS` times while its samples lie further apart than this,
(largest - smallest) / median."""
PILOT = ((1, 64), (8, 64), (1, 512))
"""Batches and contexts of decode steps tried beforehand; ``PILOT_PREFILLS``: lengths."""
PILOT_PREFILLS = (32, 128)


@dataclass
class Clock:
    """Time of this command and of the sessions before it.

    Attributes:
        began: monotonic seconds at which the command began; the start of the engine counts.
        earlier: seconds that earlier sessions took.
        budget: seconds in all.
    """

    began: float
    earlier: float
    budget: float

    @property
    def spent(self) -> float:
        return self.earlier + time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.budget - self.spent


def check_number(points: Sequence[Point]) -> None:
    """Raise UsageError for more points of a kind than a profile may have."""
    for kind, count in Counter(point.kind for point in points).items():
        if count > MOST_POINTS:
            raise UsageError(f"--grid: {count} {kind} points, a profile has at most {MOST_POINTS}; give fewer numbers")


class Session:
    """Measures those points of ``grid`` that are not in the store yet.

    Life cycle: :meth:`run` once; it may be interrupted anywhere, the store has all points that were completed.
    """

    def __init__(self, rig: Rig, store: Store, grid: Grid, limits: Limits, clock: Clock) -> None:
        self._rig, self._store, self._grid, self._limits, self._clock = rig, store, grid, limits, clock
        self._points = points(grid, limits)
        check_number(self._points)
        self._costs = Costs()
        self._failed: set[tuple] = set()
        self.progress = Progress(total=len(self._points), done=len(self._points) - len(self._todo()))

    def _todo(self) -> list[Point]:
        done = self._store.done() | self._failed
        return [point for point in self._points if point.key not in done]

    def _must(self) -> frozenset[tuple]:
        """Keys of the first decode point of each layout, and the first switch of each pair that moves KV, if there is
        none yet: without them nothing can be predicted."""
        profile = self._store.profile
        have = {(point.tp, 0) for point in profile.decode}
        have |= {(sample.from_tp, sample.to_tp) for sample in profile.switches if sample.tokens}
        first: dict[tuple, tuple] = {}
        for point in self._todo():
            if point.kind == "decode" or (point.kind == "switch" and point.batch):
                first.setdefault((point.tp, point.to_tp), point.key)
        return frozenset(key for what, key in first.items() if what not in have)

    async def run(self, display: Display) -> int:
        """Measure what there is time for; returns how many points were left out."""
        if not self._todo():
            return 0
        meter = Meter([psutil.Process(), *psutil.Process().children(recursive=True)])
        for point in self._store.profile.decode:
            self._costs.saw_decode(point.tp, point.batch, point.batch * point.context, point.seconds)
        with display.following(self.progress):
            await self._pilot()
            left, count = self._clock.left, len(self._todo())
            self._points = points(self._grid, self._limits, lambda point: worth(self._costs, point, left, count))
            first = self._clock.spent + FIRST_VISIT * left
            while (now := self._plan(first - self._clock.spent)).points:
                point = now.points[0]
                self._show(point, now)
                await self._measure(point, now)
                self.progress.others = meter.share()
            await self._visit_again(now)
            self.progress.others = meter.share()
        left_out = self.progress.left_out = self._left_out(now)
        self._store.change(
            machine=self._store.profile.machine
            | {"others_share": round(meter.share(), 3), "left_out": left_out, "failed": len(self._failed)}
        )
        return left_out

    def _plan(self, first: float) -> SweepPlan:
        """``first``: seconds left of the part of the time in which points are measured first."""
        return coverage(self._todo(), self._costs, first, self._clock.left, self._must())

    async def _visit_again(self, last: SweepPlan) -> None:
        """Measure decode points once more while there is time: all a second time, then those that vary most.

        Coarse points first, and layout after layout, so that what disturbs the machine for a while falls on all.
        """
        visits = dict.fromkeys(self._store.decode_points(self._points), 1)
        while True:
            points_found = self._store.decode_points(self._points)
            wanted = [
                point
                for point, measured in points_found.items()
                if visits[point] == 1 or (visits[point] < VISITS and spread(measured.samples) > WIDE)
            ]
            wanted = [p for p in wanted if seconds_of(self._costs, p, last.allowance) <= RESERVE * self._clock.left]
            if not wanted:
                return
            point = min(wanted, key=lambda p: (visits[p], p.level, p.context, p.batch, p.tp))
            visits[point] += 1
            self.progress.what = f"{point}, visit {visits[point]}"
            self.progress.expect(self._clock.left)
            await self._rig.reconfigure(point.tp)
            with suppress(NotMeasured):
                again = await self._decode(point, steps_for(self._costs, point, last.allowance))
                self._store.again(points_found[point], again, self._clock.spent)

    def _left_out(self, now: SweepPlan) -> int:
        """Points that ``now`` does not have, those too dear among them."""
        return self.progress.total - self.progress.done - len(self._failed) - len(now.points)

    def _show(self, point: Point, now: SweepPlan) -> None:
        self.progress.what, self.progress.layout = str(point), f"tp{self._rig.tp}"
        self.progress.left_out = self._left_out(now)
        twice = [*self._store.decode_points(self._points), *(p for p in now.points if p.kind == "decode")]
        again = total(self._costs, twice, now.allowance)
        self.progress.expect(min(now.seconds + again, self._clock.left))

    async def _pilot(self) -> None:
        """A few short runs in each layout that has something left: first estimates, and nothing cold afterwards."""
        for tp in sorted({point.tp for point in self._todo() if point.kind != "switch"}):
            await self._rig.reconfigure(tp)
            layout = next(layout for layout in self._limits.layouts if layout.tp == tp)
            self.progress.what = f"warming up {layout}"
            for batch, context in PILOT:
                if not self._limits.holds(tp, batch, length_needed(context)):
                    continue
                point = Point(kind="decode", tp=tp, replicas=layout.dp, batch=batch, context=context, level=0)
                with suppress(NotMeasured):
                    await self._decode(point, LEAST_STEPS)
            for length in PILOT_PREFILLS:
                point = Point(kind="prefill", tp=tp, replicas=layout.dp, batch=1, context=length, level=0)
                if length <= self._limits.max_length:
                    with suppress(NotMeasured):
                        await self._prefill(point)

    async def _decode(self, point: Point, steps: int) -> DecodePoint:
        found, begin = await measure.decode(self._rig, point, steps)
        tokens = point.batch * point.context
        self._costs.saw_decode(point.tp, point.batch, tokens, found.seconds)
        self._costs.saw_begin(point.tp, tokens, point.context, begin)
        return found

    async def _prefill(self, point: Point) -> PrefillPoint:
        found = await measure.prefill(self._rig, point)
        self._costs.saw_prefill(point.tp, point.batch * point.context, point.context, found.seconds)
        return found

    async def _measure(self, point: Point, now: SweepPlan) -> None:
        begin = time.monotonic()
        expected = seconds_of(self._costs, point, now.allowance)
        try:
            found = await self._one(point, now)
        except NotMeasured as error:
            self._failed.add(point.key)
            self.progress.note(str(error))
            return
        self._store.add(found, self._clock.spent)
        self.progress.done += 1
        self._costs.saw_point(point.kind, expected, time.monotonic() - begin)

    async def _one(self, point: Point, now: SweepPlan) -> DecodePoint | PrefillPoint | list[SwitchSample]:
        if point.kind == "switch":
            return await measure.switches(self._rig, point)
        await self._rig.reconfigure(point.tp)
        if point.kind == "prefill":
            return await self._prefill(point)
        found = await self._decode(point, now.steps[point.key])
        if not self._store.is_of(found, point):  # it would count for another one, and this one be measured for ever
            raise NotMeasured(f"{point}: its requests had {found.context} tokens, as the engine counts them")
        return found


def describe(machine: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """``machine`` for the profile; sessions are counted, and the first one's load is kept."""
    sessions = int(earlier.get("sessions", 0)) + 1
    machine = {name: str(value) if isinstance(value, str) else value for name, value in machine.items()}
    return machine | earlier | {"sessions": sessions, "date": time.strftime("%Y-%m-%d %H:%M")}
