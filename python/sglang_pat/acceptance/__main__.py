"""The command: every step is printed as it comes, and what fails does not stop the others."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from sglang_pat.acceptance.results import Report, Result

MOST_SHARING = 4
"""Most ranks on one GPU: eight leave each other too little of an H100 for the steps."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sglang_pat.acceptance", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--ranks", type=int, help="default: all GPUs; 2 on a CPU")
    parser.add_argument("--out", type=Path, default=Path("out/acceptance"), metavar="DIR", help="report, models")
    parser.add_argument("--engine-flags", default="", metavar="FLAGS", help="SGLang's, for every engine")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, by name")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, 1 if a step failed, 2 if it could not be run at all."""
    begun = time.monotonic()
    args = parse(argv)
    try:
        report = run(args, begun)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n" + "  ".join(str(path) for path in sorted(args.out.glob("acceptance.*"))))
    print(report.counted)
    for result in report.select_by_verdict("left out") + report.failed:
        print(f"{result.verdict}: {result.name}: {result.line}")
    return 1 if report.failed else 0


def run(args: argparse.Namespace, begun: float) -> Report:
    """Run all steps.

    Raises:
        ValueError: the machine does not have what was asked for.
    """
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: there is no GPU here; leave it out, or give --device cpu")
    ranks = args.ranks or max(2, gpus)
    if ranks < 2 or ranks & (ranks - 1):
        raise ValueError(f"--ranks {ranks}: give a power of two from 2 on, so that there is something to merge")
    if device == "cuda" and 1 < gpus < ranks:
        raise ValueError(f"{ranks} ranks need {ranks} GPUs, {gpus} are visible: give --ranks, or --device cpu")
    sharing = gpus == 1
    if sharing and ranks > MOST_SHARING:
        raise ValueError(f"--ranks {ranks}: one GPU has room for 2 or {MOST_SHARING} ranks; give one of these")
    if sharing:
        print("one GPU: all ranks share it and take turns; times of layouts above tp1 and of switches mean nothing")
    from profiler.launch import set_environment

    set_environment(quiet=True)
    from sglang_pat.acceptance import steps
    from sglang_pat.acceptance.bench import prepare
    from sglang_pat.tools.commands import check_output_folder
    from sglang_pat.tools.machine import describe_machine

    names = [format_step_name(step) for step in steps.STEPS]
    if unknown := set(args.only or ()) - set(names):
        raise ValueError(f"--only {' '.join(sorted(unknown))}: choose from {', '.join(names)}")
    check_output_folder(args.out)
    options = {
        "device": f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "cpu",
        "ranks": ranks,
        "sharing": sharing,
        "flags": args.engine_flags or "none",
    }
    report = Report(machine=describe_machine(), options=options)
    bench = prepare(device, ranks, args.out, sharing, tuple(args.engine_flags.split()))
    try:
        for step in steps.STEPS:
            if args.only and format_step_name(step) not in args.only:
                continue
            report.results.append(_run_step(step, bench))
            report.seconds = time.monotonic() - begun
            report.save(args.out)
    finally:
        bench.close()
    return report


def format_step_name(step) -> str:
    return step.__name__.replace("_", "-")


def _run_step(step, bench) -> Result:
    begun, name = time.monotonic(), format_step_name(step)
    print(f"{name}: {step.__doc__.splitlines()[0]}", flush=True)
    try:
        result = step(bench)
    except Exception as error:
        bench.stop()  # the next step starts with a fresh engine
        line = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        result = Result(name=name, verdict="failed", line=line, traceback=traceback.format_exc())
    result.name, result.seconds = name, time.monotonic() - begun
    print(f"  {result.verdict}: {result.line} ({result.seconds:.0f} s)", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
