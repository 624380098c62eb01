"""The command: make the model, run the three servers, write tables, picture and figures."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sglang_pat.demo.records import DemoError, Run, difference
from sglang_pat.demo.tasks import Task, fixed_tasks, natural_tasks
from sglang_pat.tools import console
from sglang_pat.tools.prompts import PROMPTS

if TYPE_CHECKING:
    from sglang_pat.demo import report
    from sglang_pat.demo.display import Display

MODELS = Path(".cache") / "models"
NATURAL_LIMIT, QUICK_LIMIT = 240, 320
"""Longest answer in tokens."""

QUICK_MODEL = {"hidden": 512, "intermediate": 2048, "vocab": 8009}
"""Large enough that decoding takes longer than streaming the tokens over HTTP."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_pat.demo",
        description="Chat prompts on a server that changes its layout as the batch drains, and on two static.",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny random model and fixed lengths: under 2 minutes")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for timeline.png and demo.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the figures; default DIR/demo.json")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a chat model; default: SmolLM2, made on the spot")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help=f"2 to {len(PROMPTS)}, default 16")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer; default 240, quick 320")
    parser.add_argument("--switch-at", type=int, default=4, metavar="N", help="switch with N requests left; default 4")
    args = parser.parse_args(argv)
    if args.max_new_tokens is None:
        args.max_new_tokens = QUICK_LIMIT if args.quick else NATURAL_LIMIT
    if not 2 <= args.prompts <= len(PROMPTS):
        parser.error(f"--prompts {args.prompts}: must be from 2 to {len(PROMPTS)}")
    if not 1 <= args.switch_at < args.prompts:
        parser.error(f"--switch-at {args.switch_at}: must be from 1 to {args.prompts - 1}, one below --prompts")
    if args.max_new_tokens < 8:
        parser.error(f"--max-new-tokens {args.max_new_tokens}: must be at least 8")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; give the folder of a model, or leave it out")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 if something went wrong; 2 (by argparse) for a bad command line."""
    args = parse(argv)
    # One thread a rank, and nothing to be downloaded: as `make demo` sets it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
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
    from sglang_pat.demo import report
    from sglang_pat.demo.display import Display
    from sglang_pat.demo.runs import run_setup, setups

    begin = time.monotonic()
    display = Display(place)
    machine = report.machine()
    with display.waiting("looking for the model" if args.model else "making the model, once"):
        model, name = make_model(args)
    tasks = make_tasks(args)
    limit = f"answers of up to {args.max_new_tokens} tokens"
    display.say(f"{len(tasks)} prompts to {name}, {limit}; {machine['cores']} cores of {machine['cpu']}")
    runs: list[Run] = []
    for number, setup in enumerate(setups(args.switch_at), start=1):
        run = run_setup(setup, model, tasks, display)
        runs.append(run)
        display.say(
            f"{number}/3 {run.name}: {run.tokens} tokens in {run.wall:.1f} s = "
            f"{run.tokens_per_second:.1f} tokens/s (server up in {run.start_seconds:.0f} s)"
        )
    result = report.Report(
        model=name,
        options={name: getattr(args, name) for name in ("prompts", "max_new_tokens", "switch_at", "quick")},
        runs=runs,
        different=difference(runs),
        machine=machine,
        seconds=time.monotonic() - begin,
    )
    conclude(result, args, display)
    verify(runs, result.different)
    return 0


def conclude(result: report.Report, args: argparse.Namespace, display: Display) -> None:
    """Tables, picture, figures."""
    from sglang_pat.demo import picture, report, tables

    display.console.print(tables.runs_table(result.runs, args.switch_at))
    for run in result.runs:
        if run.switches:
            display.console.print(tables.switches_table(run))
    display.say(result.summary())
    json_path, picture_path = args.json or args.out / "demo.json", args.out / "timeline.png"
    report.write(result, json_path)
    picture.save(picture.draw(result), picture_path)
    display.say(f"picture: {picture_path}\nfigures: {json_path}\n{result.seconds:.0f} s in all")


def make_model(args: argparse.Namespace) -> tuple[Path, str]:
    """The model's folder, and what to call it."""
    from sglang_pat.testing import models

    if args.model:
        return args.model, args.model.resolve().name
    try:
        if args.quick:
            return models.make_random("llama", MODELS / "demo-llama", **QUICK_MODEL), "a random Llama"
        return models.make_smollm2(MODELS / "smollm2"), "SmolLM2-135M-Instruct (float32)"
    except (ValueError, OSError) as error:
        raise DemoError(f"the model cannot be made: {error}") from error


def make_tasks(args: argparse.Namespace) -> list[Task]:
    return (fixed_tasks if args.quick else natural_tasks)(args.prompts, args.max_new_tokens)


def verify(runs: list[Run], different: dict[int, int]) -> None:
    """Raises DemoError if the runs do not show what they should."""
    for run in runs:
        for switch in run.switches:
            if switch.error:
                raise DemoError(f"{run.name}: a switch was aborted: {switch.error}")
        if run.adaptive and not any(switch.requests for switch in run.switches):
            raise DemoError(f"{run.name}: it never switched with requests alive; see --switch-at")
    if different:
        index, position = next(iter(different.items()))
        prompt = runs[0].answers[index].prompt
        raise DemoError(
            f"{len(different)} answers are not the same in all runs; the first, to {prompt!r}, differs from "
            f"character {position} on (two tokens of equal probability can do that, all else is a bug)"
        )
