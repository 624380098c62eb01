"""The command: make the models, profile them, run the rounds; tables, picture and figures."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sglang_pat.demo import cases
from sglang_pat.demo.cases import Case
from sglang_pat.demo.records import DemoError, Result, Run
from sglang_pat.tools import console

if TYPE_CHECKING:
    from sglang_pat.demo.display import Display
    from sglang_pat.demo.report import Report
    from sglang_pat.testing.prefork import Prefork

MINUTES = 8.0
ROUNDS = {True: (1, 1), False: (2, 5)}
"""Rounds of a case, quick or not: at least, at most."""

CONCLUSION_SECONDS = 15.0
"""Kept for tables and picture, and for the end of the engines."""

GRID = "batch=1,4,16,48;context=64;lone=1;prefill_batch=1,8;prefill_length=32;switch_requests=8;switch_context=64"
QUICK_GRID = "batch=1,4,8;context=64;lone=1;prefill_batch=1;prefill_length=32;switch_requests=4;switch_context=64"
BUDGET = {True: "15s", False: "80s"}
"""Of a sweep, quick or not; the start of its engine, which takes up to half of it, counts."""

WRONG_SHARE = 0.05
"""Where more responses than this differ between the layouts, it is not rounding."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_pat.demo",
        description="Long-tailed batches on an engine that changes its layout as they drain, and on both static ones.",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny random model, one round: two minutes")
    parser.add_argument("--only", choices=cases.CASES, metavar="CASE", help=f"one of {', '.join(cases.CASES)}")
    parser.add_argument("--minutes", type=float, default=MINUTES, metavar="N", help=f"at most; default {MINUTES:g}")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for demo.png and demo.json")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of the case real-link; default: SmolLM2, made here")
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: must be above 0")
    if args.quick and (args.only or args.model):
        parser.error("--quick has a case and a model of its own; leave out --only and --model")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; give the folder of a model, or leave it out")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 if something went wrong; 2 (by argparse) for a bad command line."""
    args = parse(argv)
    try:
        return demonstrate(args, console.make())
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def demonstrate(args: argparse.Namespace, place: Console) -> int:
    # Late, so that a bad command line is told at once.
    from sglang_pat.demo.display import Display
    from sglang_pat.demo.report import Report
    from sglang_pat.testing.prefork import ENVIRONMENT, Prefork
    from sglang_pat.tools.machine import machine

    begin = time.monotonic()
    os.environ.update(ENVIRONMENT)
    display, about = Display(place), machine()
    chosen = cases.QUICK if args.quick else {args.only: cases.CASES[args.only]} if args.only else cases.CASES
    display.say(f"{about['cores']} cores of {about['cpu']}; {args.minutes:g} minutes at most")
    results = []
    with ExitStack() as stack:
        prefork = stack.enter_context(Prefork()) if may_fork() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang_pat_demo_")))
        end, needed = begin + 60 * args.minutes - CONCLUSION_SECONDS, 0.0
        for number, (name, case) in enumerate(chosen.items()):
            began = time.monotonic()
            if began + needed > end:
                display.say(
                    f"{name}: left out, {args.minutes:g} minutes are not enough for it on this machine; try it with "
                    f"--only {name}"
                )
                continue
            over = began + (end - began) / (len(chosen) - number)
            results.append(run_case(name, case, args, over, folder, display, prefork))
            needed = time.monotonic() - began - extra(results[-1].rounds, ROUNDS[args.quick][0])
    report = Report(results=results, machine=about, seconds=time.monotonic() - begin)
    conclude(report, args.out, display)
    verify(results)
    return 0


def may_fork() -> bool:
    """Whether engines may be forks of one interpreter: what has touched a CUDA driver may not fork."""
    from sglang_pat.cpu import shim

    return shim.needed()


def run_case(
    name: str,
    case: Case,
    args: argparse.Namespace,
    over: float,
    folder: Path,
    display: Display,
    prefork: Prefork | None,
) -> Result:
    """One case, from its model to its figures; ``over``: when it should be (``time.monotonic``)."""
    from sglang_pat.demo import verdict
    from sglang_pat.demo.contest import Sweep, play, profile, step_times

    if args.model and case.link == cases.NATURAL:
        case, model = replace(case, model=args.model.resolve().name), args.model
    else:
        model = make_model(case, display)
    lengths = case.work.lengths()
    display.say(
        f"{name}: {case.model}, {case.link_name}; {len(lengths)} chat prompts, responses of {lengths[0]} to "
        f"{lengths[-1]} tokens, {sum(lengths)} in all"
    )
    sweep = Sweep(BUDGET[args.quick], QUICK_GRID if args.quick else GRID)
    found = profile(case, model, folder / f"{name}.json", sweep, display, prefork)
    times = step_times(found, tuple(sorted({1, 4, 16, case.work.batch})))
    display.say(f"  {verdict.steps(times)}")
    rounds = play(case, model, found, until(over, *ROUNDS[args.quick]), display, prefork)
    return Result(
        name=name, model=case.model, link=case.link, link_name=case.link_name, work=asdict(case.work), steps=times,
        rounds=rounds,
    )  # fmt: skip


def until(over: float, least: int, most: int) -> Callable[[int, float], bool]:
    """Whether there is another round: if it is likely to end in time."""
    return lambda done, longest: done < least or (done < most and time.monotonic() + longest < over)


def extra(rounds: Sequence[Sequence[Run]], least: int) -> float:
    """Seconds of the rounds beyond the first ``least``."""
    return sum(run.seconds for runs in rounds[least:] for run in runs)


def make_model(case: Case, display: Display) -> Path:
    """Its folder."""
    try:
        with display.waiting(f"making the model {case.model}, once"):
            return cases.MAKERS[case.model]()
    except (ValueError, OSError) as error:
        raise DemoError(f"the model cannot be made: {error}") from error


def conclude(report: Report, out: Path, display: Display) -> None:
    """Tables, sentences, picture, figures."""
    from sglang_pat.demo import picture, tables, verdict
    from sglang_pat.demo.report import write

    for result in report.results:
        display.console.print(tables.table(result))
    display.say("")
    display.say(verdict.headline(report.results))
    display.say(verdict.choice(report.results))
    for result in report.results:
        if verdict.standing(result) != "ahead":
            display.say(f"why not ahead with {result.model}, {result.link_name}: {verdict.reason(result)}")
    display.say(report.summary())
    write(report, out / "demo.json")
    picture.save(picture.draw(report), out / "demo.png")
    display.say(f"picture: {out / 'demo.png'}\nfigures: {out / 'demo.json'}\n{report.seconds:.0f} s in all")


def verify(results: list[Result]) -> None:
    """Raises DemoError if a switch failed, or if responses differ that should be equal."""
    for result in results:
        for runs in result.rounds:
            for switch in runs[-1].switches:
                if switch.error:
                    raise DemoError(f"{result.name}: a switch was aborted: {switch.error}")
        different, responses = result.different(), result.responses()
        if different > WRONG_SHARE * responses:
            raise DemoError(
                f"{result.name}: {different} of {responses} responses are not the same in all layouts; two tokens of "
                "equal probability can do that now and then, all else is a bug"
            )
