"""The command: compare policies on simulated batches, or take the decisions of a log again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sglang_pat import files
from sglang_pat.memory.machine import GIB
from sglang_pat.predict.profile import Profile, load
from sglang_pat.replay.compare import SIMULATED, Machine, Workload, check_policy, compare
from sglang_pat.replay.log import Replayed, read_schedule, replay_log
from sglang_pat.replay.measured import against_measured
from sglang_pat.replay.report import summary, table
from sglang_pat.replay.shapes import LONGEST, NAMED, parse_shape
from sglang_pat.replay.simulate import SPACING, Batch, Run, crowded
from sglang_pat.tools.commands import Parser, one_line, output_folder
from sglang_pat.tools.console import Speaker

BOUNDS = {
    "batch": (1, 1 << 16),
    "prompt": (0, LONGEST),
    "group": (1, 1 << 16),
    "rounds": (1, 100_000),
    "seed": (0, (1 << 63) - 1),
}
"""What the numbers of the command line may be."""

MEMORY = 2 * GIB
"""That a replay may need."""


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog="python -m sglang_pat.replay",
        description="Simulate draining batches on a profile under several policies, or decide a log again (--log).",
    )
    result.add_argument("--profile", metavar="FILE", help="of python -m profiler.sweep, or one of studies/profiles/")
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
        help=f"separated by commas: {', '.join(SIMULATED)}, threshold:N, static:TP, oracle (always shown); "
        "default pat,survival,oracle",
    )
    result.add_argument("--out", type=Path, metavar="DIR", help="for replay.png and replay.json")
    result.add_argument("--log", type=Path, metavar="FILE", help="a decision log of an engine (--pat-log)")
    result.add_argument(
        "--schedule", action="store_true", help="with --log: print its switches as entries for POST /pat/schedule"
    )
    result.add_argument(
        "--measured", action="store_true", help="with --log: against decisions on the step times that the run measured"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parser().parse_args(argv)
        return _log(args) if args.log else _compare(args)
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def _log(args: argparse.Namespace) -> int:
    """Exit code 1 if a decision came out differently."""
    if args.measured:
        return _measured(args)
    if args.schedule:
        print(json.dumps(read_schedule(args.log)))
        return 0
    result = Replayed()
    with _speaker().showing(lambda: f"{result.decisions} decisions taken again"):
        for result in replay_log(args.log, args.profile):  # noqa: B007 (shown while it goes on)
            pass
    for line, logged, found in result.different[:10]:
        print(f"line {line}: the log says {logged}, this version {found}")
    if result.steps:
        print(f"{result.steps} steps: {result.spent.line()}")
    same = result.decisions - len(result.different)
    print(f"{result.decisions} decisions, {result.switches} of them to switch: {same} came out the same")
    return 1 if result.different else 0


def _measured(args: argparse.Namespace) -> int:
    with _speaker().showing(lambda: "decisions taken again, three times"):
        found = against_measured(args.log, args.profile)
    factors = ", ".join(f"tp{tp} {factor.scale:.3f}" for tp, factor in found.factors.items())
    print(f"{found.decisions} decisions; measured over profiled step time: {factors}")
    print(f"profile as it is: {found.kept} differ from those on measured times, at worst {found.kept_loss:.1%}")
    print(f"as corrected in the run: {found.corrected}, at worst {found.corrected_loss:.1%}")
    return 0


def _check(args: argparse.Namespace) -> list[str]:
    """The policies; ValueError with one line for whatever cannot be."""
    if not args.profile or not args.lengths:
        raise ValueError("give --profile and --lengths, or --log")
    for name, (low, high) in BOUNDS.items():
        if not low <= getattr(args, name) <= high:
            raise ValueError(f"--{name} {getattr(args, name)}: must be from {low} to {high}")
    if args.limit is not None and not 1 <= args.limit <= LONGEST:
        raise ValueError(f"--limit {args.limit}: must be from 1 to {LONGEST}")
    if not 0 <= args.rho <= 1:
        raise ValueError(f"--rho {args.rho}: must be from 0 to 1")
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    if not policies:
        raise ValueError("--policies: give at least one")
    return list(dict.fromkeys(policies))


def check_memory(workload: Workload, profile: Profile, policies: int) -> None:
    """Raise ValueError for what :func:`compare` would need too much memory for, as far as one can tell beforehand."""
    dp = [profile.fingerprint.num_ranks // tp for tp in profile.fingerprint.degrees]
    longest = workload.shape.limit
    # Of replay/simulate.py: moments at which something ends or is asked, and those at which a layout may change.
    ends = min(workload.batch, longest) + longest // 256 + 64
    points = min(ends, longest // SPACING + longest // 256 + 64)
    tables = 8 * (6 * ends * max(dp) + points * sum(dp))
    kept = points * 256 * (workload.rounds * (policies + 1) + len(dp) ** 2)
    need = tables + kept + 256 * workload.batch
    if need > MEMORY:
        raise ValueError(
            f"--batch {workload.batch}, --rounds {workload.rounds}, responses of up to {longest} tokens: this needs "
            f"{need / GIB:.0f} GiB of memory, {MEMORY // GIB} GiB are allowed; give a smaller batch, fewer rounds or a "
            "lower --limit"
        )


@dataclass(frozen=True, kw_only=True)
class _Followed(Workload):
    """Says which round is under way."""

    begun: Callable[[int], None]

    def batches(self) -> Iterator[Batch]:
        for number, batch in enumerate(super().batches(), 1):
            self.begun(number)
            yield batch


def _compare(args: argparse.Namespace) -> int:
    policies, speaker = _check(args), _speaker()
    profile = load(args.profile, complete=True)
    for name in policies:
        check_policy(name, tuple(profile.fingerprint.degrees))
    shape = parse_shape(args.lengths, args.limit)
    state = {"doing": "checking", "round": 0}
    workload = _Followed(
        shape=shape,
        batch=args.batch,
        rounds=args.rounds,
        prompt=args.prompt,
        correlation=args.rho,
        group=args.group,
        seed=args.seed,
        begun=lambda number: state.update(round=number),
    )
    check_memory(workload, profile, len(policies))
    if args.out:
        output_folder(args.out)
    machine = Machine(profile)
    with speaker.showing(lambda: "{doing} round {round} of {rounds}".format(rounds=workload.rounds, **state)):
        warnings = dict.fromkeys(filter(None, (crowded(profile.fingerprint, batch) for batch in workload.batches())))
        state["doing"] = "simulating"
        runs = compare(machine, workload, [name for name in policies if name != "oracle"])
    console = speaker.console
    if warnings:
        console.print(f"[yellow]note:[/] the batch {next(iter(warnings))}", soft_wrap=True)
    title = (
        f"{Path(args.profile).stem} ({profile.kind}), {shape.name}, limit {shape.limit}, batch {workload.batch} in "
        f"groups of {workload.group}, ρ={workload.correlation}, prompt {workload.prompt}, {workload.rounds} rounds, "
        f"seed {workload.seed}"
    )
    console.print(table(runs, title))
    if args.out:
        _write(args.out, runs, title)
        console.print(f"wrote {args.out / 'replay.png'} and replay.json", soft_wrap=True)
    return 0


def _write(folder: Path, runs: dict[str, list[Run]], title: str) -> None:
    from sglang_pat.replay.picture import draw

    text = json.dumps({"title": title, "policies": summary(runs)}, indent=1)
    draw(runs, title, folder / "replay.png")
    files.write(text.encode() + b"\n", folder / "replay.json")


def _speaker() -> Speaker:
    return Speaker(Console(highlight=False))
