"""Policies on the same simulated batches, round after round, and what each loses against the oracle.

python -m studies.compare --profile FILE --lengths SHAPE [--batch N] [--rho R] [--policies pat,survival,static:2]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from sglang_pat.config import POLICIES
from sglang_pat.coordinator.round_tracker import RoundTracker
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.predict.cost import SwitchCosts, build_predictors
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile, describe_thinness, load
from sglang_pat.tools.commands import Parser, UsageError, run
from studies.shapes import NAMED, Shape, parse_shape
from studies.simulate import SPACING, Batch, Drain, SimulatedReports, SimulatedRun, describe_queueing, find_best_run

SIMULATED = tuple(name for name in POLICIES if name != "schedule")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rounds to simulate.

    Attributes:
        prompt: tokens of each prompt.
        correlation: of the lengths of one prompt's responses, which come in groups of ``group``.
    """

    shape: Shape
    batch: int
    rounds: int = 8
    prompt: int = 256
    correlation: float = 0.0
    group: int = 8
    seed: int = 0

    def make_batches(self) -> Iterator[Batch]:
        """Batches of the workload: equal for equal values; families differ from round to round."""
        random = np.random.default_rng(self.seed)
        groups = -(-self.batch // self.group)
        for number in range(self.rounds):
            yield Batch(
                prompt=np.full(self.batch, self.prompt),
                length=self.shape.draw(self.batch, self.correlation, self.group, random),
                family=number * groups + np.arange(self.batch) // self.group,
                limit=self.shape.limit,
            )


@dataclass
class ProfiledMachine:
    """A profile with its predictor and switch costs."""

    profile: Profile
    predictor: Predictor = field(init=False)
    costs: SwitchCosts = field(init=False)

    def __post_init__(self) -> None:
        self.predictor, self.costs = build_predictors(self.profile)

    def drain(self, batch: Batch, spacing: int = SPACING) -> Drain:
        return Drain(self.predictor, self.costs, self.profile.fingerprint, batch, spacing)

    def make_policy(self, name: str):
        """The policy called ``name``, ``threshold`` with its number after a colon.

        It knows of no bound on the requests of a replica, since none waits here, however many there are.
        """
        kind, _, number = name.partition(":")
        return make_policy(kind, switch_at=int(number or 8), predictor=self.predictor, costs=self.costs)


def check_policy(name: str, degrees: tuple[int, ...]) -> None:
    """Raise ValueError, one line, unless ``name`` can be compared."""
    kind, colon, number = name.partition(":")
    if kind == "static":
        if number in map(str, degrees):
            return
        raise ValueError(f"policy {name}: give static:TP with TP one of {', '.join(map(str, degrees))}")
    if kind == "threshold" and (not colon or (number.isdecimal() and int(number) > 0)):
        return
    if name in SIMULATED or name == "oracle":
        return
    raise ValueError(f"policy {name}: choose from {', '.join(SIMULATED)}, threshold:N, static:TP, oracle")


KNOWN = ", complete batch"
"""Ending of a policy's name: it is told that the batch is complete, and does not wait for more requests in the first
round either."""

AS_IS = ", profile as is"
"""Ending of a policy's name: it believes its profile to the end."""


def compare(
    machine: ProfiledMachine,
    workload: Workload,
    policies: list[str],
    spacing: int = SPACING,
    *,
    believed: ProfiledMachine | None = None,
    noise: float | None = None,
    calibration: float | None = None,
) -> dict[str, list[SimulatedRun]]:
    """Runs of every policy, by round; ``oracle`` is always among them.

    Args:
        believed: what policies have for the machine's profile; None for the right one.
        noise: policies correct it by the steps of the run, reported with this standard deviation of their logarithm;
            None: they do not.
        calibration: before the first round the layouts are measured with this standard deviation; None: they are not.

    What a policy has learnt of lengths it keeps from round to round.  After two rounds of one size it knows, as in an
    engine, that no more requests come.
    """
    histories = {name: LengthHistory() for name in policies}
    believed = believed or machine
    degrees = tuple(machine.profile.fingerprint.degrees)
    deciding = {
        name: believed.make_policy(name.removesuffix(KNOWN).removesuffix(AS_IS))
        for name in policies
        if not name.startswith(("static", "oracle"))
    }
    reports = {
        name: SimulatedReports(believed.predictor, degrees, noise, np.random.default_rng(workload.seed))
        for name in deciding
        if noise is not None and not name.endswith(AS_IS)
    }
    if calibration is not None:
        for reported in reports.values():
            reported.calibrate(machine.predictor, machine.profile.fingerprint.num_ranks, calibration)
    runs: dict[str, list[SimulatedRun]] = {name: [] for name in [*policies, "oracle"]}
    tracker = RoundTracker()
    for batch in workload.make_batches():
        for _ in batch.length:
            tracker.record_arrival(0.0)
        drain = machine.drain(batch, spacing)
        runs["oracle"].append(find_best_run(drain))
        for name in policies:
            if name in deciding:
                complete = tracker.complete or name.endswith(KNOWN)
                runs[name].append(drain.run_policy(deciding[name], histories[name], complete, reports.get(name)))
            elif name != "oracle":
                runs[name].append(drain.run_static(int(name.partition(":")[2])))
        tracker.update_request_count(0)
    return runs


def compute_regrets(runs: dict[str, list[SimulatedRun]], name: str) -> np.ndarray:
    """Time beyond the oracle's as a share of it, by round, ``[rounds]``."""
    best = np.array([run.seconds for run in runs["oracle"]])
    return np.array([run.seconds for run in runs[name]]) / best - 1


def make_table(runs: dict[str, list[SimulatedRun]], title: str) -> Table:
    """One line a policy: means over rounds.  ``survival`` also without the first round, before which it knows nothing.

    Regret: time beyond the oracle's, as a share of it.
    """
    result = Table(title=title, title_justify="left")
    for name in ("policy", "seconds", "regret", "worst", "switches", "pauses"):
        result.add_column(name, justify="left" if name == "policy" else "right")
    parts = {name: (name, slice(None)) for name in runs}
    if len(runs.get("survival", ())) > 1:
        parts["survival, later rounds"] = "survival", slice(1, None)
    for part, (name, rounds) in parts.items():
        counted, regret = runs[name][rounds], compute_regrets(runs, name)[rounds]
        result.add_row(
            part, f"{np.mean([run.seconds for run in counted]):.2f}", f"{regret.mean():+.2%}", f"{regret.max():+.2%}",
            f"{np.mean([len(run.switches) for run in counted]):.1f} (max {max(len(run.switches) for run in counted)})",
            f"{np.mean([sum(switch[3] for switch in run.switches) for run in counted]):.2f} s",
        )  # fmt: skip
    return result


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m studies.compare", description="Simulate draining batches under several policies.")
    profiles = "of python -m profiler.sweep, or one of studies/profiles/"
    parser.add_argument("--profile", metavar="FILE", required=True, help=profiles)
    text = f"a file with a length a line, {', '.join(NAMED)}, lognormal:MU,SIGMA,CAP or "
    text += "body-atom:MU,SIGMA,CAP,PROBABILITY"
    parser.add_argument("--lengths", metavar="SHAPE", required=True, help=text)
    parser.add_argument("--limit", type=int, help="most tokens of a response; default: the shape's cap")
    parser.add_argument("--batch", type=int, default=128, help="responses a round (default 128)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (default 256)")
    parser.add_argument("--group", type=int, default=8, help="responses to one prompt (default 8)")
    parser.add_argument("--rho", type=float, default=0.0, help="correlation of lengths in a group, 0 to 1 (default 0)")
    parser.add_argument("--rounds", type=int, default=8, help="batches, one after another (default 8)")
    parser.add_argument("--seed", type=int, default=0)
    text = f"separated by commas: {', '.join(SIMULATED)}, threshold:N, static:TP; the oracle is always shown"
    parser.add_argument("--policies", default="pat,survival", help=f"{text} (default pat,survival)")
    args = parser.parse_args(argv)
    for name in ("batch", "group", "rounds", "limit"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
    if not 0 <= args.rho <= 1:
        raise UsageError(f"--rho {args.rho}: must be from 0 to 1")
    machine = ProfiledMachine(load(args.profile, complete=True))
    policies = [name for name in dict.fromkeys(args.policies.split(",")) if name != "oracle"]
    try:
        for name in policies:
            check_policy(name, machine.profile.fingerprint.degrees)
        shape = parse_shape(args.lengths, args.limit)
    except ValueError as error:
        raise UsageError(str(error)) from None
    workload = Workload(
        shape=shape, batch=args.batch, rounds=args.rounds, prompt=args.prompt, correlation=args.rho, group=args.group,
        seed=args.seed,
    )  # fmt: skip
    console = Console(highlight=False)
    warnings = (describe_queueing(machine.profile.fingerprint, batch) for batch in workload.make_batches())
    if warning := next(filter(None, warnings), None):
        console.print(f"[yellow]note:[/] the batch {warning}", soft_wrap=True)
    if thin := describe_thinness(machine.profile):
        console.print(f"[yellow]note:[/] {args.profile} is {thin}", soft_wrap=True)
    title = (
        f"{Path(args.profile).stem} ({machine.profile.kind}), {shape.name}, limit {shape.limit}, batch {args.batch} in "
        f"groups of {args.group}, ρ={args.rho}, prompt {args.prompt}, {args.rounds} rounds, seed {args.seed}"
    )
    console.print(make_table(compare(machine, workload, policies), title))
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.compare", main))
