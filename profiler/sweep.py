"""Measure one deployment.

    python -m profiler.sweep --model-path M --tp 1 --dp 2 --out profile.json [--budget 10m] [--grid ...] [SGLang flags]

Interrupted (Ctrl-C or kill), the file has all points measured so far and the same command goes on.  Exit codes: 0 done,
1 too much failed to predict anything, 2 bad input (one line, the file untouched), 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler import display as displays
from profiler import grid as grids
from profiler import launch
from profiler.budget import parse_budget
from profiler.rig import Rig
from profiler.session import Clock, Session, describe
from profiler.store import Store, check_asked, check_same, existing
from profiler.windows import WINDOW
from sglang_pat.predict.cost import fitted
from sglang_pat.predict.profile import LayoutSetup, Profile, ProfileError
from sglang_pat.tools.commands import Parser, UsageError, run


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line.  ``budget``: seconds; ``flags``: SGLang's."""

    model: str
    out: Path
    budget: float
    axes: dict[str, tuple[int, ...]]
    temperature: float
    flags: list[str]

    @property
    def asked(self) -> dict[str, str | float]:
        """What a profile must have been asked for to go on with it."""
        return {"grid": grids.canonical(self.axes), "temperature": self.temperature}


def parse(argv: list[str] | None) -> Options:
    """Raises UsageError."""
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
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of sampling, 0 greedy; default 1")
    args, flags = parser.parse_known_args(argv)
    try:
        budget = parse_budget(args.budget)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not 0 <= args.temperature <= 10:
        raise UsageError(f"--temperature {args.temperature}: must be from 0 to 10")
    return Options(
        model=args.model_path, out=args.out, budget=budget, axes=grids.parse(args.grid), temperature=args.temperature,
        flags=flags,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    options = parse(argv)
    found = existing(options.out)
    if found is not None:
        check_asked(options.out, found, options.asked)
    args = launch.server_args(options.model, options.flags)
    if found is not None:
        # Without an engine: it takes a while to start.
        check_same(options.out, found, launch.deployment(args))
    display = displays.make()
    with display.waiting("starting the engine"):
        engine = launch.start(args)
    sweep = None
    try:
        sweep = _Sweep(engine, options, found, display, began, tuple(engine.setup_costs()))
        return launch.run(engine, sweep.run)
    except KeyboardInterrupt:
        display.say(sweep.interrupted() if sweep else "interrupted before the first point")
        return 130
    finally:
        engine.shutdown()


class _Sweep:
    """The command once the engine runs."""

    def __init__(
        self,
        engine: Any,
        options: Options,
        found: Profile | None,
        display: displays.Display,
        began: float,
        setup: tuple[LayoutSetup, ...],
    ) -> None:
        self._engine, self._options, self._found, self._display = engine, options, found, display
        self._began, self._fingerprint, self._setup = began, engine.deployment(), setup
        self._session: Session | None = None

    async def run(self) -> int:
        options, fingerprint = self._options, self._fingerprint
        rig = Rig(self._engine, options.temperature)
        await rig.connect()
        limits = rig.limits(fingerprint.kv_tokens, fingerprint.max_running)
        if self._found is None:
            grid = grids.resolve(options.axes, limits)
            store = Store.fresh(options.out, fingerprint, grid, options.asked)
        else:
            grid = grids.Grid(**{name: tuple(values) for name, values in self._found.grid.items()})
            store = Store(options.out, self._found)
        clock = Clock(self._began, store.spent, options.budget)
        self._session = session = Session(rig, store, grid, limits, clock)
        progress = session.progress
        if self._found and self._found.complete and progress.done == progress.total:
            self._display.say(f"{options.out} is complete: {progress.done} points; nothing to do")
            return 0
        self._start_file(store)
        self._display.say(
            f"{fingerprint.model}, {len(limits.layouts)} layouts, {progress.total} points"
            + (f", {progress.done} measured before" if progress.done else "")
            + f"; {displays.clock(max(0, clock.left))} left of {displays.clock(options.budget)}"
        )
        left_out = await session.run(self._display)
        for note in self._session.progress.notes:
            self._display.say(f"not measured: {note}")
        try:
            fitted(store.profile)
        except ProfileError as error:
            self._display.say(f"{options.out}: not enough was measured ({error}); the same command goes on")
            return 1
        machine = store.profile.machine | {"spent_seconds": round(clock.spent, 1)}
        store.change(complete=True, machine=machine)
        self._display.say(self._summary(store.profile, left_out, clock))
        return 0

    def _start_file(self, store: Store) -> None:
        from sglang_pat.tools.machine import machine

        store.change(
            machine=describe(machine(), store.profile.machine), setup=store.profile.setup or self._setup,
            window=WINDOW, complete=False,
        )  # fmt: skip

    def _summary(self, profile: Profile, left_out: int, clock: Clock) -> str:
        share = profile.machine.get("others_share", 0)
        busy = "" if isinstance(share, str) or share <= 0.1 else f"; other programs took {share:.0%} of the cores"
        return (
            f"{self._options.out}: {len(profile.decode)} decode, {len(profile.prefill)} prefill points, "
            f"{len(profile.switches)} switches in {displays.clock(clock.spent)}"
            + (f"; {left_out} points left out for the budget, a larger --budget adds them" if left_out else "")
            + busy
        )

    def interrupted(self) -> str:
        if self._session is None:
            return "interrupted before the first point"
        progress = self._session.progress
        return (
            f"interrupted: {progress.done} of {progress.total} points are in {self._options.out}; "
            "the same command goes on"
        )


if __name__ == "__main__":
    sys.exit(run("profiler.sweep", main))
