"""Mixtures of experts: what a round takes in each layout, and whether ``survival`` starts it in the best one.

    python -m studies.starts [--quick] [--json FILE] [--jobs N] [--seed N]

A round is generated once for each degree in which it may start, with ``survival`` from there on, and once in each
static layout.  Replicas have room for so many KV tokens; what does not fit waits, and is put back when its replica is
full.  Prefill is left out, but for that of what was put back.  The policy has a profile with the grid of
``profiler.sweep``; the true times are those of :class:`studies.modelled.Roofline`.  Where all of a round's KV fits in
every degree the start is held against the oracle too, which knows all lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from profiler import grid
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Load, Policy, Snapshot
from sglang_pat.policies.start import RoundKind, StartDegrees
from sglang_pat.predict.cost import SwitchCosts, build_predictors
from sglang_pat.predict.predictor import Number
from sglang_pat.predict.profile import Profile
from sglang_pat.rollout.records import SampleId
from sglang_pat.tools.commands import Parser, run
from studies import modelled
from studies.modelled import A3B, H100, LLAMA, MIXTRAL, QWEN_32B, RANKS, ModelSize, Roofline
from studies.rounds import Replica
from studies.shapes import parse_shape
from studies.simulate import Batch, Drain, find_best_seconds

MODELS = {model.name: model for model in (A3B, MIXTRAL, LLAMA, QWEN_32B)}
DEPLOYMENTS = ((A3B.name, 4), (A3B.name, 2), (A3B.name, 1), (MIXTRAL.name, 2), (LLAMA.name, 1), (QWEN_32B.name, 2))
"""Deployments as (model, base degree); the dense ones for comparison."""
SAMPLES, CAPS = (128, 256, 512, 1024), (8192, 16384)
PROMPT, GROUP, CORRELATION = 512, 8, 0.5
ASK_SECONDS = 1.0
"""Seconds between two questions to the policy."""
GOAL = 0.01
"""Most that a start may lose, as a share."""
FITS = 0.95
"""Share of the room for KV that a round that fits takes at most."""
REDUCE_SECONDS = {1: 0.0, 2: 6e-6, 4: 8e-6, 8: 11e-6}
"""Seconds of an all-reduce of few bytes, by degree."""
WITHOUT_REDUCE = 52e-6
"""Seconds of a layer in every step, without its all-reduces."""


@dataclass(frozen=True, kw_only=True)
class SlowReduce(Roofline):
    """An all-reduce takes longer among more ranks (a guess), instead of a fixed time in every layout."""

    def _compute_fixed_seconds(self, tp: int) -> float:
        return self.model.layers * (WITHOUT_REDUCE + 2 * REDUCE_SECONDS[tp])


@dataclass(frozen=True, kw_only=True)
class Node:
    """A deployment: the true times, and what the policy has for them."""

    model: ModelSize
    times: Roofline
    profile: Profile
    room: dict[int, int]
    costs: SwitchCosts
    policy: Policy

    def step_seconds(self, tp: int, batch: Number, tokens: Number, replicas: Number | None = None) -> Number:
        """True seconds of a step, with a predictor's arguments."""
        return np.where(np.asarray(batch) > 0, self.times.step_seconds(tp, batch, tokens), 0.0)


@cache
def make_node(name: str, base_tp: int, slow_reduce: bool) -> Node:
    model = MODELS[name]
    times = modelled.make_h100(model)
    if slow_reduce:
        times = SlowReduce(**vars(times))
    axes = grid.BATCHES, grid.CONTEXTS
    profile = modelled.build(H100, model, base_tp, ("profiler.sweep's grid",), False, times, axes)
    # Prefill is left out of the rounds, so the policy is not to count it.
    predictor, costs = build_predictors(msgspec.structs.replace(profile, prefill=()))
    return Node(
        model=model,
        times=times,
        profile=profile,
        room=modelled.count_room(H100, model, base_tp),
        costs=costs,
        policy=make_policy("survival", predictor=predictor, costs=costs, max_running=None),
    )


@dataclass
class SimulatedCourse:
    """How a round went: seconds, switches as (seconds, degree), samples put back for want of room."""

    seconds: float = 0.0
    switches: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    retracted: int = 0


class SimulatedGeneration:
    """A round of ``lengths`` responses on a node from one degree on.

    Args:
        policy: asked from time to time; None: the layout stays.
        least: degree below which it may not go, as earlier rounds had too little room.
    """

    def __init__(
        self,
        node: Node,
        lengths: np.ndarray,
        limit: int,
        tp: int,
        history: LengthHistory,
        policy: Policy | None = None,
        least: int = 1,
    ) -> None:
        self.node, self.lengths, self.limit, self.tp = node, lengths, limit, tp
        self._policy, self._history = policy, history
        self._least, self._last_switch = least, float("-inf")
        self.course, self.now = SimulatedCourse(), 0.0
        self._replicas = self._make(tp)
        for number, length in enumerate(lengths):
            sample = SampleId(0, number // GROUP, number, 0)
            self._replicas[number % len(self._replicas)].add(sample, PROMPT, int(length), 0.0)

    def run(self) -> SimulatedCourse:
        asked, left = 0.0, len(self.lengths)
        while left:
            replica = min(self._replicas, key=lambda replica: replica.due)
            if self._policy is not None and asked + ASK_SECONDS < replica.due:
                self.now = asked = max(self.now, asked + ASK_SECONDS)
                self._ask(self._policy)
                continue
            self.now = max(self.now, replica.due)
            replica.advance(self.now)
            sample = replica.pop_finished()
            if sample is None:
                contexts = replica.retract()
                self.course.retracted += len(contexts)
                replica.clock += sum(float(self.node.times.prefill_seconds(self.tp, 1, one)) for one in contexts)
                continue
            left -= 1
            length = int(self.lengths[sample.number])
            self._history.observe(length, sample.index, length < self.limit)
        self.course.seconds = self.now
        return self.course

    def _make(self, tp: int) -> list[Replica]:
        def seconds(batch: int, tokens: float) -> float:
            return float(self.node.times.step_seconds(tp, batch, tokens))

        return [Replica(seconds, len(self.lengths), self.now, self.node.room[tp]) for _ in range(RANKS // tp)]

    def _ask(self, policy: Policy) -> None:
        for replica in self._replicas:
            replica.advance(self.now)
        running_samples = [(s, int(context), int(left), place) for place, replica in enumerate(self._replicas)
                 for s, context, left in [*zip(replica.ids, replica.context, replica.left, strict=True),
                                          *replica.waiting]]  # fmt: skip
        if not running_samples:
            return
        contexts = np.array([context for _, context, *_ in running_samples])
        load = make_load(len(running_samples), self.limit, contexts - PROMPT)
        load = replace(
            load,
            family=np.array([s.index for s, *_ in running_samples]),
            replica=np.array([place for *_, place in running_samples]),
        )
        snapshot = make_snapshot(
            self.node, self.tp, len(running_samples), now=self.now, peak=len(self.lengths), complete=True, load=load,
            last_switch=self._last_switch, start=self._least, switches=len(self.course.switches),
        )  # fmt: skip
        degree = policy(snapshot, self._history).tp
        if degree == self.tp:
            return
        running = np.concatenate([replica.context for replica in self._replicas])
        self.now += self.node.costs.estimate(self.tp, degree, running).seconds
        self.tp, self._last_switch = degree, self.now
        self.course.switches.append((self.now, degree))
        before, self._replicas = len(self._replicas), self._make(degree)
        # Those that decode come first.  Replicas merge whole; when tp is lowered each is spread over its parts.
        for sample, context, left, place in sorted(running_samples, key=lambda one: one[1], reverse=True):
            replicas = self._replicas[place % len(self._replicas) :: before]
            min(replicas, key=len).add(sample, context, left, self.now)


def make_load(count: int, limit: int, output: np.ndarray) -> Load:
    each = np.arange(count)
    return Load(
        prompt=np.full(count, PROMPT), output=output, limit=np.full(count, limit), family=each // GROUP,
        replica=np.zeros(count, dtype=int),
    )  # fmt: skip


def make_snapshot(node: Node, tp: int, requests: int, **more: object) -> Snapshot:
    values = {"now": 0.0, "peak": 0, "last_arrival": 0.0} | more
    degrees = tuple(node.profile.fingerprint.degrees)
    return Snapshot(tp=tp, degrees=degrees, num_ranks=RANKS, requests=requests, room=node.room, **values)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class StartCell:
    """A setting, and what its rounds took: one number a round in each list, in seconds where no other unit is said.

    Attributes:
        chosen: degrees in which ``survival`` starts; ``oracle_lost``: what that loses against the oracle's start, as a
            share; empty where KV does not fit.
        started: by the degree in which the round starts, ``survival`` from there on; ``static``: by layout.
        retracted: by the degree in which the round starts.
    """

    model: str
    base_tp: int
    slow_reduce: bool
    samples: int
    cap: int
    chosen: list[int]
    oracle_lost: list[float]
    oracle_start: list[int]
    started: dict[int, list[float]]
    static: dict[int, list[float]]
    retracted: dict[int, list[int]]

    @property
    def seconds(self) -> float:
        """Mean time of a round as ``survival`` starts it."""
        return float(np.mean([self.started[tp][number] for number, tp in enumerate(self.chosen)]))

    @property
    def best(self) -> int:
        """Degree with the least mean time.  Of single rounds chance decides, where samples wait for room."""
        return min(self.started, key=lambda tp: np.mean(self.started[tp]))

    @property
    def lost(self) -> float:
        """What the starts lose against starting in :attr:`best`, as a share; below 0 where rounds need different ones.

        From the second round on, if there is one: before the first, nothing is known of the lengths.
        """
        later = slice(len(self.chosen) > 1, None)
        taken = [self.started[tp][number] for number, tp in enumerate(self.chosen)][later]
        return float(np.mean(taken) / min(np.mean(each[later]) for each in self.started.values())) - 1

    @property
    def first_lost(self) -> float:
        """What the first start loses against the best one of this round."""
        return self.started[self.chosen[0]][0] / min(each[0] for each in self.started.values()) - 1


Task = tuple[str, int, bool, int, int, int, int]
"""(model, base degree, slow all-reduce, samples, cap, rounds, seed)."""


def study(task: Task) -> StartCell:
    name, base_tp, slow_reduce, samples, cap, rounds, seed = task
    node = make_node(name, base_tp, slow_reduce)
    degrees = tuple(node.profile.fingerprint.degrees)
    shape, random = parse_shape(f"lognormal:7.919,0.885,{cap}"), np.random.default_rng(seed)
    history, starts = LengthHistory(), StartDegrees(degrees)
    cell = StartCell(
        name, base_tp, slow_reduce, samples, cap, [], [], [], *({tp: [] for tp in degrees} for _ in range(3))
    )
    for _ in range(rounds):
        lengths = shape.draw(samples, CORRELATION, GROUP, random)
        rule = starts.get_start_degree(RoundKind("", samples))
        coming = make_load(samples, cap, np.zeros(samples, dtype=int))
        snapshot = make_snapshot(node, base_tp, samples, coming=coming, start=rule.tp)
        chosen = node.policy(snapshot, history).tp
        cell.chosen.append(chosen)
        learnt = history
        for tp in degrees:
            learning = deepcopy(history)
            course = SimulatedGeneration(node, lengths, cap, tp, learning, node.policy, rule.tp).run()
            cell.started[tp].append(course.seconds + node.costs.estimate(base_tp, tp).seconds)
            cell.retracted[tp].append(course.retracted)
            cell.static[tp].append(SimulatedGeneration(node, lengths, cap, tp, LengthHistory()).run().seconds)
            if tp == chosen:
                learnt = learning
                rule.observe(course.retracted, int(lengths.sum()), course.seconds)
        history = learnt
        if (best := _find_oracle_seconds(node, lengths, cap)) is not None:
            cell.oracle_lost.append(best[chosen] / min(best.values()) - 1)
            cell.oracle_start.append(min(best.items(), key=lambda item: item[1])[0])
    return cell


def _find_oracle_seconds(node: Node, lengths: np.ndarray, cap: int) -> dict[int, float] | None:
    """The least time by the degree of the start; None if KV does not fit in every degree."""
    count = np.arange(1, len(lengths) + 1)
    most = int((count * (np.sort(lengths)[::-1] + PROMPT)).max())
    if any(most > FITS * tokens * (RANKS // tp) for tp, tokens in node.room.items()):
        return None
    batch = Batch(
        prompt=np.full(len(lengths), PROMPT), length=lengths, family=np.zeros(len(lengths), dtype=int), limit=cap
    )
    return find_best_seconds(Drain(node, node.costs, node.profile.fingerprint, batch, spacing=64))  # pyright: ignore[reportArgumentType]


def format_steps(name: str) -> Table:
    """Step times by the requests of the node."""
    node = make_node(*next(each for each in DEPLOYMENTS if each[0] == name), False)
    table = Table(title=f"{name}: ms of a step, contexts of 4,096 tokens (modelled)", title_justify="left")
    for column in ("requests", "experts read, tp2", *(f"tp{tp}" for tp in (1, 2, 4, 8))):
        table.add_column(column, justify="right")
    for requests in (1, 8, 32, 128, 256, 512, 1024):
        each = {tp: max(1, requests * tp // RANKS) for tp in (1, 2, 4, 8)}
        share = node.model.count_experts(each[2]) / max(node.model.experts, 1)
        times = [f"{1e3 * float(node.times.step_seconds(tp, n, 4096 * n)):.1f}" for tp, n in each.items()]
        table.add_row(str(requests), f"{share:.0%}", *times)
    return table


def format_rounds(cells: list[StartCell], slow_reduce: bool) -> Table:
    """Means of the rounds, as text."""
    after = "; all-reduces of 6, 8, 11 µs on 2, 4, 8 ranks" if slow_reduce else ""
    table = Table(title=f"Seconds a round, mean{after} (modelled)", title_justify="left")
    for column in ("model, base", "samples, cap", *(f"static tp{tp}" for tp in (1, 2, 4, 8)), "survival", "starts in",
                   "best start", "lost", "first round", "oracle's start", "lost, worst round"):  # fmt: skip
        table.add_column(column, justify="left" if column.startswith("model") else "right")
    for cell in (cell for cell in cells if cell.slow_reduce == slow_reduce):
        static = [f"{np.mean(cell.static[tp]):.1f}" if tp in cell.static else "" for tp in (1, 2, 4, 8)]
        oracle = [_list_degrees(cell.oracle_start), f"{max(cell.oracle_lost):.2%}"] if cell.oracle_lost else ["", ""]
        table.add_row(
            f"{cell.model}, tp{cell.base_tp}", f"{cell.samples}, {cell.cap // 1024}K", *static, f"{cell.seconds:.1f}",
            _list_degrees(cell.chosen), f"tp{cell.best}", f"{cell.lost:.2%}",
            f"{cell.first_lost:.2%}", *oracle,
        )  # fmt: skip
    return table


def _list_degrees(degrees: list[int]) -> str:
    """Degrees in the order of the rounds; one if all are equal."""
    return ", ".join(f"tp{tp}" for tp in (degrees if len({*degrees}) > 1 else degrees[:1]))


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer settings and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all figures")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default 0)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--rounds", type=int, default=4, help="of each setting (default 4)")
    args: argparse.Namespace = parser.parse_args(argv)
    deployments = [each for each in DEPLOYMENTS if each[0] in args.models]
    samples, rounds = (SAMPLES[1:3], 1) if args.quick else (SAMPLES, args.rounds)
    tasks: list[Task] = [
        (*each, slow, count, cap, rounds, args.seed)
        for slow in (False, True) for each in deployments for count in samples for cap in CAPS
    ]  # fmt: skip
    with ProcessPoolExecutor(args.jobs) as pool:
        done = pool.map(study, tasks)
        cells = list(track(done, "settings", len(tasks), console=Console(stderr=True)))
    console = Console(highlight=False, width=200 if not sys.stdout.isatty() else None)
    for name in dict.fromkeys(name for name, _ in deployments):
        console.print(format_steps(name))
    for slow in (False, True):
        console.print(format_rounds(cells, slow))
    lost = [max(cell.oracle_lost or [cell.lost]) for cell in cells]
    console.print(f"{sum(share > GOAL for share in lost)} of {len(lost)} settings lose more than {GOAL:.0%}.")
    if args.json:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.starts", main))
