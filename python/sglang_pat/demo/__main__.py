"""The command: make the model, profile it, run the rounds; a table, a sentence, a picture and figures."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from sglang_pat import files
from sglang_pat.demo import cases
from sglang_pat.demo.cases import DemoCase
from sglang_pat.tools import commands, console
from sglang_pat.tools.console import Speaker

if TYPE_CHECKING:
    from sglang_pat.demo.contest import ContestResult, StepTime

MINUTES = 8
ROUNDS = {True: (1, 1), False: (2, 5)}
"""Least and most rounds, by whether the demonstration is quick."""
CONCLUSION_SECONDS = 15.0
"""Seconds kept for table and picture, and for the end of the engines."""
GRID = "batch=1,4,16,48;context=64;lone=1;prefill_batch=1,8;prefill_length=32;switch_requests=8;switch_context=64"
QUICK_GRID = "batch=1,4,8;context=64;lone=1;prefill_batch=1;prefill_length=32;switch_requests=4;switch_context=64"
BUDGET = {True: "15s", False: "80s"}
"""Budget of a sweep, by whether the demonstration is quick; the start of its engine, which takes up to half of it,
counts."""
EVEN = 0.02
"""Times nearer to each other than this share are level."""
WRONG_SHARE = 0.05
"""Share of responses that may differ between the layouts by rounding."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_pat.demo",
        description="A long-tailed batch on an engine that changes its layout as it drains, and on both static ones.",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny random model, one round: two minutes")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for demo.png and demo.json")
    for gone in ("--only", "--model"):
        parser.add_argument(gone, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only or args.model:
        parser.error("--only, --model: the demonstration has one case; bench/rollout.py runs others")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the demonstration; returns 0, 1 if something went wrong, or 2 for a bad command line."""
    args = parse(argv)
    from sglang_pat.demo.contest import DemoError  # late, so that a bad command line is told at once

    try:
        commands.check_output_folder(args.out)  # the rounds take minutes
        return demonstrate(args, console.make())
    except commands.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def demonstrate(args: argparse.Namespace, place: Console) -> int:
    from sglang_pat.demo import picture
    from sglang_pat.demo.contest import ContestResult, predict_step_times, run_rounds, sweep_profile
    from sglang_pat.testing.prefork import ENVIRONMENT, Prefork
    from sglang_pat.tools.machine import describe_machine

    begin = time.monotonic()
    os.environ.update(ENVIRONMENT)
    speaker, machine = Speaker(place), describe_machine()
    case = cases.QUICK["quick"] if args.quick else cases.CASE
    lengths = case.work.compute_lengths()
    described = f"{case.model}, {case.link_name}; {len(lengths)} prompts, {lengths[0]} to {lengths[-1]} tokens long"
    speaker.say(f"{machine['cores']} cores of {machine['cpu']}; {MINUTES} minutes at most\n{described}")
    model = make_model(case, speaker)
    with ExitStack() as stack:
        prefork = stack.enter_context(Prefork()) if may_fork() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang_pat_demo_")))
        grid = QUICK_GRID if args.quick else GRID
        profile = sweep_profile(case, model, folder / "profile.json", BUDGET[args.quick], grid, speaker, prefork)
        steps = predict_step_times(profile, tuple(sorted({1, 4, 16, case.work.batch})))
        speaker.say(f"  {format_step_times(steps)}")
        more = make_stop_rule(begin + 60 * MINUTES - CONCLUSION_SECONDS, *ROUNDS[args.quick])
        result = ContestResult(steps, run_rounds(case, model, profile, more, speaker, prefork))
    speaker.console.print(make_table(result))
    responses = result.count_responses()
    same = f"texts equal in all layouts: {responses - result.count_different()} of {responses}"
    speaker.say(f"\n{format_headline(result)}\n{same}")
    content = {"machine": machine, "case": case, "steps": steps, "rounds": result.rounds} | {
        "median_seconds": {name: result.compute_median(name) for name in result.contenders}
    }
    files.write(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n", args.out / "demo.json")
    footer = (
        f"{described}. {machine['cores']} CPU cores ({machine['cpu']}), rounds in turns: {len(result.rounds)}; {same}"
    )
    picture.draw(result, format_headline(result), footer, args.out / "demo.png")
    speaker.say(f"picture: {args.out / 'demo.png'}\nfigures: {args.out / 'demo.json'}")
    speaker.say(f"{time.monotonic() - begin:.0f} s in all")
    verify(result)
    return 0


def may_fork() -> bool:
    """Whether engines may be forks of one interpreter: what has touched a CUDA driver may not fork."""
    from sglang_pat.cpu import shim

    return shim.is_needed()


def make_model(case: DemoCase, speaker: Speaker) -> Path:
    """Make the case's model, and return its folder."""
    from sglang_pat.demo.contest import DemoError

    try:
        with speaker.show_waiting(f"making the model {case.model}, once"):
            return cases.MAKERS[case.model]()
    except (ValueError, OSError) as error:
        raise DemoError(f"the model cannot be made: {error}") from error


def make_stop_rule(over: float, least: int, most: int) -> Callable[[int, float], bool]:
    """A rule whether there is another round: if it is likely to end in time."""
    return lambda done, longest: done < least or (done < most and time.monotonic() + longest < over)


def format_headline(result: ContestResult) -> str:
    """The message: the adaptive engine against both static layouts, by the medians."""
    better, worse = result.static
    ours = result.compute_median(result.contenders[-1])
    ratio = result.compute_median(better) / ours
    level = abs(ratio - 1) <= EVEN
    comparison = f"as fast as {better}" if level else f"{ratio:.2f} times as fast as {better}, the better static layout"
    return f"Adaptive is {comparison}, and {result.compute_median(worse) / ours:.2f} times as fast as {worse}"


def format_step_times(times: list[StepTime]) -> str:
    texts = (f"{' / '.join(f'{s * 1e3:.0f}' for s in t.seconds.values())} ms with {t.requests}" for t in times)
    return f"a decode step takes, as {' / '.join(times[0].seconds)}: {', '.join(texts)} requests"


def make_table(result: ContestResult) -> Table:
    """Rows of the table, one a contender."""
    table = Table(box=None)
    for name in ("", "seconds, median", "rounds", "other programs", "switches"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for at, name in enumerate(result.contenders):
        runs = [of_round[at] for of_round in result.rounds]
        table.add_row(
            name, f"{result.compute_median(name):.1f}", " ".join(f"{run.seconds:.1f}" for run in runs),
            f"{max(run.others for run in runs):.0%} of the cores",
            " ".join(str(sum(bool(switch.requests) for switch in run.switches)) for run in runs),
        )  # fmt: skip
    return table


def verify(result: ContestResult) -> None:
    """Check the runs; raises DemoError if a switch failed, or if responses differ that should be equal."""
    from sglang_pat.demo.contest import DemoError

    for switch in (switch for runs in result.rounds for switch in runs[-1].switches):
        if switch.error:
            raise DemoError(f"a switch was aborted: {switch.error}")
    different, responses = result.count_different(), result.count_responses()
    if different > WRONG_SHARE * responses:
        raise DemoError(
            f"{different} of {responses} responses are not the same in all layouts; two tokens of equal probability "
            "can do that now and then, all else is a bug"
        )


if __name__ == "__main__":
    sys.exit(main())
