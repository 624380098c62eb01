"""The command: compare policies on simulated batches, or take the decisions of a log again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sglang_pat.predict.profile import load
from sglang_pat.replay.compare import Machine, Work, check_policy, compare
from sglang_pat.replay.log import replay_log
from sglang_pat.replay.measured import against_measured
from sglang_pat.replay.report import summary, table
from sglang_pat.replay.shapes import NAMED, parse_shape
from sglang_pat.replay.simulate import crowded


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m sglang_pat.replay",
        description="Simulate draining batches on a profile under several policies, or decide a log again (--log).",
    )
    result.add_argument("--profile", metavar="FILE", help="of python -m profiler.sweep, or one of profiles/")
    result.add_argument(
        "--lengths",
        metavar="SHAPE",
        help=f"a file with a length a line (or JSON), {', '.join(NAMED)}, lognormal:MU,SIGMA,CAP "
        "or body-atom:MU,SIGMA,CAP,PROBABILITY",
    )
    result.add_argument("--limit", type=int, help="most tokens of a response; default: the shape's cap")
    result.add_argument("--batch", type=int, default=128, help="responses a round (default 128)")
    result.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (default 256)")
    result.add_argument("--group", type=int, default=8, help="responses to one prompt (default 8)")
    result.add_argument("--rho", type=float, default=0.0, help="correlation of lengths in a group, 0 to 1 (default 0)")
    result.add_argument("--rounds", type=int, default=8, help="batches, one after another (default 8)")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument(
        "--policies",
        default="pat,survival,oracle",
        help="separated by commas: survival, pat, threshold:N, static:TP, oracle (always shown); "
        "default pat,survival,oracle",
    )
    result.add_argument("--out", type=Path, metavar="DIR", help="for replay.png and replay.json")
    result.add_argument("--log", type=Path, metavar="FILE", help="a decision log of an engine (--pat-log)")
    result.add_argument(
        "--measured", action="store_true", help="with --log: against decisions on the step times that the run measured"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return _log(args) if args.log else _compare(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _log(args: argparse.Namespace) -> int:
    """Exit code 1 if a decision came out differently."""
    if args.measured:
        found = against_measured(args.log, args.profile)
        factors = ", ".join(f"tp{tp} {factor:.3f}" for tp, factor in found.factors.items())
        print(f"{found.decisions} decisions; measured over profiled step time: {factors}")
        print(f"profile as it is: {found.kept} differ from those on measured times, at worst {found.kept_loss:.1%}")
        print(f"as corrected in the run: {found.corrected}, at worst {found.corrected_loss:.1%}")
        return 0
    result = replay_log(args.log, args.profile)
    for line, logged, found in result.different[:10]:
        print(f"line {line}: the log says {logged}, this version {found}")
    same = result.decisions - len(result.different)
    print(f"{result.decisions} decisions, {result.switches} of them to switch: {same} came out the same")
    return 1 if result.different else 0


def _check(args: argparse.Namespace) -> list[str]:
    """The policies; ValueError with one line for whatever cannot be."""
    if not args.profile or not args.lengths:
        raise ValueError("give --profile and --lengths, or --log")
    for name, low in (("batch", 1), ("prompt", 0), ("group", 1), ("rounds", 1), ("seed", 0)):
        if getattr(args, name) < low:
            raise ValueError(f"--{name} {getattr(args, name)}: must be at least {low}")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit {args.limit}: must be at least 1")
    if not 0 <= args.rho <= 1:
        raise ValueError(f"--rho {args.rho}: must be from 0 to 1")
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    if not policies:
        raise ValueError("--policies: give at least one")
    return list(dict.fromkeys(policies))


def _compare(args: argparse.Namespace) -> int:
    policies = _check(args)
    profile = load(args.profile)
    for name in policies:
        check_policy(name, tuple(profile.fingerprint.degrees))
    shape = parse_shape(args.lengths, args.limit)
    machine = Machine(profile)
    work = Work(
        shape=shape,
        batch=args.batch,
        rounds=args.rounds,
        prompt=args.prompt,
        correlation=args.rho,
        group=args.group,
        seed=args.seed,
    )
    if args.out:
        _folder(args.out)
    console = Console(highlight=False)
    warnings = dict.fromkeys(filter(None, (crowded(profile.fingerprint, batch) for batch in work.batches())))
    if warnings:
        console.print(f"[yellow]note:[/] the batch {next(iter(warnings))}", soft_wrap=True)
    runs = compare(machine, work, [name for name in policies if name != "oracle"])
    title = (
        f"{Path(args.profile).stem} ({profile.kind}), {shape.name}, limit {shape.limit}, batch {work.batch} in groups "
        f"of {work.group}, ρ={work.correlation}, prompt {work.prompt}, {work.rounds} rounds, seed {work.seed}"
    )
    console.print(table(runs, title))
    if args.out:
        from sglang_pat.replay.picture import draw

        draw(runs, title, args.out / "replay.png")
        text = json.dumps({"title": title, "policies": summary(runs)}, indent=1)
        (args.out / "replay.json").write_text(text + "\n")
        console.print(f"wrote {args.out / 'replay.png'} and replay.json", soft_wrap=True)
    return 0


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror}") from None
