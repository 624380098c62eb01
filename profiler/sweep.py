"""Measure one deployment.

    python -m profiler.sweep --model-path M --tp 1 --dp 2 --out profile.json [--budget 10m] [--grid ...] [SGLang flags]

Interrupted (Ctrl-C or kill), the file has all points measured so far and the same command goes on.  Exit codes: 0 done,
1 too much failed to predict anything, 2 bad input (one line, the file untouched), 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from profiler import grid as grids
from profiler import launch, measure
from profiler.grid import LEAST_STEPS, STEPS, Grid, Limits, Point, list_points, list_required_points
from profiler.measure import NotMeasured, TooSlow
from profiler.rig import NoSwitch, Rig
from profiler.store import Store, check_asked, check_same, load_existing
from profiler.windows import WINDOWS
from sglang_pat.predict.cost import build_predictors
from sglang_pat.predict.profile import (
    DecodePoint,
    PrefillPoint,
    Profile,
    ProfileError,
    SwitchSample,
    describe_thinness,
)
from sglang_pat.tools import console
from sglang_pat.tools.commands import Parser, UsageError, run
from sglang_pat.tools.console import Speaker
from sglang_pat.tools.cpu_share import Meter

SHARES, LEAST_LIMIT = 5, 0.05
"""Factors of a point's limit: it may take so many times its share of the time left, and this part of the budget in any
case.  What is slower is left out, and what has more requests or tokens is not tried: there the predictor goes on with
the last slope."""
LEAST_SHARE = 0.5
"""Least seconds of a point, however little time is left."""
TEMPERATURE = 1.0
"""Temperature of the sampling, as in a rollout."""
SPECULATE = "--pat-speculate"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line: ``budget`` in seconds, ``axes`` of the grid, and SGLang's ``flags``.  Raises UsageError."""
    parser = Parser(
        prog="python -m profiler.sweep",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog="Every other flag is SGLang's or the adaptive engine's: --tp, --dp, --pat-candidates, --dtype, ...",
    )
    parser.add_argument("--model-path", "--model", required=True, metavar="M", help="the model, as for the server")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="profile to write, or to go on with")
    parser.add_argument("--budget", default="10m", metavar="TIME", help="such as 90s, 10m, 1h; default 10m")
    axes = "batch, context, lone, prefill_batch, prefill_length, switch_requests, switch_context"
    parser.add_argument("--grid", metavar="AXES", help=f"batch=1,2,4;context=64,128; axes: {axes}")
    args, args.flags = parser.parse_known_args(argv)
    if any(flag.split("=")[0] == SPECULATE for flag in args.flags):
        raise UsageError(f"{SPECULATE}: a profile is of steps without drafts; leave it out")
    args.budget, args.axes = parse_budget(args.budget), grids.parse(args.grid)
    return args


def parse_budget(text: str) -> float:
    """``90s``, ``10m``, ``1.5h`` or seconds → seconds.

    Raises:
        UsageError: none of these, or not more than 0.
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    unit = units.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"--budget {text!r}: give a time such as 90s, 10m or 1.5h")
    return value


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    profile, axes = load_existing(options.out), grids.format_axes(options.axes)
    if profile is not None:
        check_asked(options.out, profile, axes)
    args = launch.make_server_args(options.model_path, options.flags)
    if profile is not None:
        # Without an engine: it takes a while to start.
        check_same(options.out, profile, launch.make_fingerprint(args))
    speaker = Speaker(console.make())
    with speaker.show_waiting("starting the engine"):
        engine = launch.start(args)
    try:
        return launch.run(engine, lambda: measure_all(engine, options, profile, axes, speaker))
    except KeyboardInterrupt:
        kept = f": what was measured is in {options.out}; the same command goes on" if options.out.exists() else ""
        speaker.say(f"interrupted{kept}")
        return 130
    finally:
        engine.shutdown()


async def measure_all(
    engine: Any, options: argparse.Namespace, earlier: Profile | None, axes: str, speaker: Speaker
) -> int:
    """The command once the engine runs; ``earlier``: the profile to go on with, ``axes``: the canonical ``--grid``."""
    rig = Rig(engine, TEMPERATURE)
    await rig.connect()
    fingerprint = engine.get_fingerprint()
    limits = rig.compute_limits(fingerprint.kv_tokens, fingerprint.max_running)
    if earlier is None:
        grid = grids.resolve(options.axes, limits).as_lists()
        earlier = Profile(fingerprint=fingerprint, grid=grid, machine={"grid": axes})
    sweep = Sweep(rig, Store(options.out, earlier), limits, options.budget, speaker, time.monotonic())
    if earlier.complete and sweep.done == sweep.total:
        speaker.say(f"{options.out} is complete: {sweep.done} points; nothing to do")
        return 0
    before = f", {sweep.done} measured before" if sweep.done else ""
    budget = f"{clock(sweep.left)} left of {clock(options.budget)}"
    speaker.say(f"{fingerprint.model}, {len(limits.layouts)} layouts, {sweep.total} points{before}; {budget}")
    await sweep.run()
    for note in sweep.notes:
        speaker.say(f"not measured: {note}")
    profile = sweep.store.profile
    try:
        build_predictors(profile)
    except ProfileError as error:
        speaker.say(f"{options.out}: not enough was measured ({error}); the same command goes on")
        return 1
    sweep.store.change(complete=True)
    profile, others = sweep.store.profile, float(profile.machine["others_share"])
    speaker.say(
        f"{options.out}: {len(profile.decode)} decode, {len(profile.prefill)} prefill points, "
        f"{len(profile.switches)} switches in {clock(sweep.spent)}"
        + (f"; {sweep.left_out} points left out, a larger --budget adds them" if sweep.left_out else "")
        + (f"; {thin}" if (thin := describe_thinness(profile)) else "")
        + (f"; other programs took {others:.0%} of the cores" if others > 0.1 else "")
    )
    return 0


def clock(seconds: float) -> str:
    """Seconds as ``m:ss``; 0 for what is over."""
    left = max(0, int(seconds))
    return f"{left // 60}:{left % 60:02d}"


class Sweep:
    """Measures those points of the store's grid that are not in it yet.

    Life cycle: :meth:`run` once; it may be interrupted anywhere, the store has all points that were completed.

    Attributes:
        total, done, left_out: points.
        what: being measured now.
        notes: points that could not be measured, and why.

    Args:
        budget: seconds in all, of this session and those before.
        began: monotonic seconds at which the session began to measure.

    Raises:
        UsageError: the grid has too many points.
    """

    def __init__(self, rig: Rig, store: Store, limits: Limits, budget: float, speaker: Speaker, began: float) -> None:
        self.store, self._rig, self._limits, self._speaker = store, rig, limits, speaker
        self._budget, self._began = budget, began - store.spent
        self._points = list_points(Grid(**{name: tuple(values) for name, values in store.profile.grid.items()}), limits)
        self._slow: list[Point] = []
        have = store.list_done()
        self._todo = [point for point in self._points if point not in have]
        self.total, self.left_out, self.what = len(self._points), 0, ""
        self.done, self.notes = self.total - len(self._todo), list[str]()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self._budget - self.spent

    @property
    def line(self) -> str:
        """One line that says how far the sweep is."""
        text = f"  {self.done:3d} of {self.total} points, {clock(self.left)} left: {self.what}"
        return text + (f"; {self.left_out} left out" if self.left_out else "")

    async def run(self) -> None:
        """Measure each point once, then the decode points a second time, as long as there is time."""
        from sglang_pat.tools.machine import describe_machine

        store, before = self.store, self.store.profile.machine
        session = {"sessions": int(before.get("sessions", 0)) + 1, "date": time.strftime("%Y-%m-%d %H:%M")}
        # The first session's load is kept.
        store.change(machine=describe_machine() | before | session, window=STEPS // WINDOWS, complete=False)
        meter = Meter([psutil.Process(), *psutil.Process().children(recursive=True)])
        must = list_required_points(self._points)
        with self._speaker.show_progress(lambda: self.line):
            await self._warm_up()
            for place, point in enumerate(self._todo):
                if point not in must and (self.left <= 0 or any(is_beyond(point, slow) for slow in self._slow)):
                    self.left_out += 1
                    continue
                share = max(LEAST_SHARE, self.left / (len(self._todo) - place))
                limit = max(SHARES * share, LEAST_LIMIT * self._budget)
                await self._measure(point, share, math.inf if point in must else limit)
            # A machine changes in minutes, more than the steps of one visit show.
            again = [point for point in self._points if point.kind == "decode" and point in store.list_done()]
            for place, point in enumerate(again):
                share = self.left / (len(again) - place)
                if share >= LEAST_SHARE:
                    await self._measure(point, share, share)
        others, failed = round(meter.share(), 3), len(self.notes)
        left = {
            "points": self.total,
            "left_out": self.left_out,
            "failed": failed,
            "spent_seconds": round(self.spent, 1),
        }
        store.change(machine=store.profile.machine | {"others_share": others} | left)

    async def _warm_up(self) -> None:
        """Warm up each layout once, not counted: the first steps of an engine are slow."""
        for layout in self._limits.layouts:
            first = next((p for p in self._points if (p.kind, p.tp) == ("decode", layout.tp)), None)
            if first is not None:
                self.what = f"warming up {layout}"
                with suppress(NotMeasured, NoSwitch):
                    await self._rig.reconfigure(layout.tp)
                    await measure.decode(self._rig, first, LEAST_STEPS)

    async def _measure(self, point: Point, share: float, limit: float) -> None:
        self.what = str(point)
        again = point in self.store.list_done()
        try:
            measured = await self._one(point, share, limit)
        except (NotMeasured, NoSwitch) as error:
            if isinstance(error, TooSlow):
                self._slow.append(point)
            if not again:
                self.notes.append(str(error) if isinstance(error, NotMeasured) else f"{point}: {error}")
            return
        self.store.add(measured, self.spent)
        self.done += not again

    async def _one(self, point: Point, share: float, limit: float) -> DecodePoint | PrefillPoint | list[SwitchSample]:
        if point.kind == "switch":
            return await measure.measure_switches(self._rig, point, limit)
        await self._rig.reconfigure(point.tp)
        if point.kind == "prefill":
            return await measure.measure_prefill(self._rig, point, limit)
        decoded = await measure.decode(self._rig, point, share=share, limit=limit)
        if decoded.context < 1 or self.store.find_point(decoded) != point:
            raise NotMeasured(f"{point}: its requests had {decoded.context} tokens, as the engine counts them")
        return decoded


def is_beyond(point: Point, slow: Point) -> bool:
    """Whether ``point`` takes at least as long as ``slow``."""
    return point.row == slow.row and point.batch >= slow.batch and point.context >= slow.context


if __name__ == "__main__":
    sys.exit(run("profiler.sweep", main))
