"""A draining batch, step by step, on the step times of a profile.

All requests start together and are dealt to the replicas in turn: request i is on replica i mod R.  So it stays when
tp is raised, since replicas merge whole.  When tp is lowered, those that are left are dealt anew.  (The engine does so
by tokens, each replica's to its own parts: the same where one replica had them all.)

For schedules, and so for the oracle, requests go back where they were when tp is lowered.  What a layout takes for an
interval of token steps then does not depend on what was before, which makes the dynamic programming exact.  An oracle
that deals anew would choose the moments at which chance parts the long responses.

Between two switches replicas run independently; a switch comes at one token index for all, so the fast ones wait for
the slowest.  In an engine they would be further on: static layouts are exact, and a policy that switches is understated
beside an oracle that sees when waits are short; by how much says :mod:`studies.own_pace`.
Prefill at the start is the same for all and left out.  Queueing is not modelled: see :func:`describe_queueing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Load, Policy, Snapshot
from sglang_pat.predict.correction import TURNS, StepFactors, Steps
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor
from sglang_pat.predict.profile import Fingerprint

CHECK_EVERY = ((8, 128), (32, 1024), (256, None))
"""Token steps after which policies are asked though nothing ended, up to a token index.  An engine asks every 0.1 s;
it matters at the start, where they wait for the batch to be complete."""

SPACING = 16
"""Least token steps between two questions: load reports come every few steps, not after each."""

REPORT_STEPS = 32
"""Steps that a leader tells of in one report, at most."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests, int64 ``[requests]`` each; ``length`` is known to the oracle only."""

    prompt: np.ndarray
    length: np.ndarray
    family: np.ndarray
    limit: int


@dataclass
class SimulatedRun:
    """What happened: total seconds; switches as (token index, from, to, seconds of pause)."""

    seconds: float
    switches: list[tuple[int, int, int, float]] = field(default_factory=list[tuple[int, int, int, float]])


class Drain:
    """One batch on one profile: elapsed time of every layout between any two points, and switch costs there.

    Attributes:
        points: token indices at which a layout may change, ``[points]``; the last one is the longest response.
    """

    def __init__(
        self,
        predictor: StepPredictor,
        costs: SwitchCosts,
        fingerprint: Fingerprint,
        batch: Batch,
        spacing: int = SPACING,
    ) -> None:
        self.fingerprint, self.batch, self.costs = fingerprint, batch, costs
        self.degrees = tuple(fingerprint.degrees)
        longest = int(batch.length.max())
        start, spans = 0, list[np.ndarray]()
        for every, end in CHECK_EVERY:
            spans.append(np.arange(start, end or longest, every))
            start = end or longest
        grid = np.concatenate(spans)
        ends = np.unique(np.concatenate([grid[grid < longest], batch.length]))
        self.points = _thin_out(ends, spacing, grid)
        self._ends, self._inside = ends, np.searchsorted(ends, self.points)
        self._predictor = predictor
        self._elapsed: dict[tuple[int, int], np.ndarray] = {}
        self._costs: dict[tuple[int, int, int], float] = {}

    def compute_elapsed(self, predictor: StepPredictor, tp: int, dealt: int = 0) -> np.ndarray:
        """Seconds of each replica from point number ``dealt``, where requests were dealt, to each point from there on,
        ``[replicas, points - dealt]``."""
        replicas = self.fingerprint.num_ranks // tp
        ends = self._ends[self._inside[dealt] :]
        running = self.list_running(dealt)
        replica = np.arange(len(running)) % replicas
        last = np.searchsorted(ends, self.batch.length[running])  # it runs in the intervals before this end
        number = _sum_running(replica, last, np.ones(len(last)), replicas, len(ends))
        prompts = _sum_running(replica, last, self.batch.prompt[running], replicas, len(ends))
        # Step times are linear in tokens between knots, so the middle step stands for the interval.
        middle = (ends[:-1] + ends[1:] - 1) / 2
        active = np.broadcast_to((number > 0).sum(axis=0), number.shape)
        step = predictor.step_seconds(tp, number, prompts + number * middle, np.maximum(active, 1))
        seconds = np.where(number > 0, step, 0.0) * np.diff(ends)
        elapsed = np.concatenate([np.zeros((replicas, 1)), np.cumsum(seconds, axis=1)], axis=1)
        return elapsed[:, self._inside[dealt:] - self._inside[dealt]]

    def elapsed(self, tp: int, dealt: int = 0) -> np.ndarray:
        """Elapsed seconds by the true step times; see :meth:`compute_elapsed`."""
        if (tp, dealt) not in self._elapsed:
            self._elapsed[tp, dealt] = self.compute_elapsed(self._predictor, tp, dealt)
        return self._elapsed[tp, dealt]

    def seconds(self, tp: int, start: int, dealt: int = 0) -> np.ndarray:
        """Seconds from point number ``start`` to each point from there on, in one layout, ``[points - start]``.

        Args:
            dealt: point number, at most ``start``, at which requests were dealt to the replicas.
        """
        elapsed = self.elapsed(tp, dealt)[:, start - dealt :]
        return (elapsed - elapsed[:, :1]).max(axis=0)

    def switch_seconds(self, point: int, from_tp: int, to_tp: int) -> float:
        """Pause of a switch at a point, as the profile's costs have it."""
        key = (point, from_tp, to_tp)
        if key not in self._costs:
            running = self.list_running(point)
            lengths = self.batch.prompt[running] + self.points[point]
            self._costs[key] = self.costs.estimate(from_tp, to_tp, lengths).seconds
        return self._costs[key]

    def list_running(self, point: int) -> np.ndarray:
        """Numbers of the requests that still run at a point."""
        return np.flatnonzero(self.batch.length > self.points[point])

    def run_static(self, tp: int) -> SimulatedRun:
        return SimulatedRun(seconds=float(self.seconds(tp, 0)[-1]))

    def run_schedule(self, schedule: list[tuple[int, int]]) -> SimulatedRun:
        """Time with given switches: (point, tp) in order, from the base layout."""
        changes = dict(schedule)

        def decide(point: int, now: float, tp: int, last_switch: float, dealt: int) -> int:
            return changes.get(point, tp)

        return self.drive(decide, deals=False)

    def run_policy(
        self, policy: Policy, history: LengthHistory, complete: bool = False, reports: SimulatedReports | None = None
    ) -> SimulatedRun:
        """Time with a policy that is asked at every point; it sees, and ``history`` learns, what an engine would.

        Args:
            complete: it knows that no more requests come; if not, it waits for them.
            reports: of the steps, for a policy that learns from them how wrong its profile is.
        """
        order = np.argsort(self.batch.length, kind="stable")
        reported = switches = 0
        steps = reports.begin(self) if reports is not None else None

        def decide(point: int, now: float, tp: int, last_switch: float, dealt: int) -> int:
            nonlocal reported, switches
            while self.batch.length[order[reported]] <= self.points[point]:
                request = order[reported]
                self._learn(history, request)
                reported += 1
            seen = replace(self.make_snapshot(point, now, tp, last_switch, complete, dealt), switches=switches)
            if reports is not None and steps is not None:
                steps(point, now, tp, dealt)
                factors, lengths = reports.factors, seen.load.prompt + seen.load.output
                doubts = factors.compute_uncertainty(tp, seen.num_ranks, lengths)
                seen = replace(seen, factors=factors.get_factors(), doubts=doubts)
            chosen = policy(seen, history).tp
            switches += chosen != tp
            return chosen

        run = self.drive(decide, deals=True)
        for request in order[reported:]:
            self._learn(history, request)
        if reports is not None:
            reports.clock += run.seconds
        return run

    def _learn(self, history: LengthHistory, request: int) -> None:
        length = int(self.batch.length[request])
        history.observe(length, int(self.batch.family[request]), finished=length < self.batch.limit)

    def make_snapshot(
        self,
        point: int,
        now: float,
        tp: int,
        last_switch: float = float("-inf"),
        complete: bool = False,
        dealt: int = 0,
    ) -> Snapshot:
        """What an engine's policy would see at a point."""
        running = self.list_running(point)
        number = len(running)
        place = np.searchsorted(self.list_running(dealt), running)
        return Snapshot(
            now=now,
            tp=tp,
            degrees=self.degrees,
            num_ranks=self.fingerprint.num_ranks,
            requests=number,
            peak=len(self.batch.length),
            last_arrival=0.0,
            last_switch=last_switch,
            complete=complete,
            load=Load(
                prompt=self.batch.prompt[running],
                output=np.full(number, max(self.points[point], 1)),  # prefill is over: each has its first token
                limit=np.full(number, self.batch.limit),
                family=self.batch.family[running],
                replica=place % (self.fingerprint.num_ranks // tp),
            ),
        )

    def drive(self, decide: Callable[[int, float, int, float, int], int], deals: bool) -> SimulatedRun:
        """Run the batch; ``decide``: the degree to be in, for (point, now, degree in force, end of the last switch,
        last deal); ``deals``: lowering tp deals requests anew."""
        tp, begun, since, last_switch, dealt = self.degrees[0], 0.0, 0, float("-inf"), 0
        elapsed = self.seconds(tp, 0)
        run = SimulatedRun(seconds=0.0)
        for point in range(len(self.points) - 1):
            now = begun + float(elapsed[point - since])
            chosen = decide(point, now, tp, last_switch, dealt)
            if chosen != tp:
                pause = self.switch_seconds(point, tp, chosen)
                run.switches.append((int(self.points[point]), tp, chosen, pause))
                begun = last_switch = now + pause
                dealt = point if deals and chosen < tp else dealt
                tp, since, elapsed = chosen, point, self.seconds(chosen, point, dealt)
        run.seconds = begun + float(elapsed[-1])
        return run


def find_best_run(drain: Drain) -> SimulatedRun:
    """The best schedule of switches for a batch whose lengths are known: what any policy's time is measured against.

    Least total time from the base layout, by dynamic programming over (point, layout).

    ``best[j, t]``: least time from point j to the end when layout t is entered there.  It is held up to some later
    point k and left for another layout, or held to the end; what a layout takes does not depend on the past, so this
    is exact.  O(points² · degrees) time.
    """
    degrees, last = drain.degrees, len(drain.points) - 1
    best, onward, target, until = solve(drain)
    schedule: list[tuple[int, int]] = []
    point, t = 0, 0
    if last and onward[0, 0] < best[0, 0]:
        t = int(target[0, 0])
        schedule.append((0, degrees[t]))
    while until[point, t] < last:
        point = int(until[point, t])
        t = int(target[point, t])
        schedule.append((point, degrees[t]))
    return drain.run_schedule(schedule)


def find_best_seconds(drain: Drain) -> dict[int, float]:
    """Least seconds of the batch by the degree in which it starts."""
    return dict(zip(drain.degrees, solve(drain)[0][0].tolist(), strict=True))


def solve(drain: Drain) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``[points, degrees]`` each: least time from a point to the end when a layout is entered there; the same when it
    is left there, and for which; the point up to which it is held."""
    degrees, last = drain.degrees, len(drain.points) - 1
    best = np.zeros((last + 1, len(degrees)))
    # Best continuation when the layout is left at a point, and for which.
    onward = np.full((last + 1, len(degrees)), np.inf)
    target = np.zeros((last + 1, len(degrees)), dtype=int)
    until = np.full((last + 1, len(degrees)), last)
    for point in range(last - 1, -1, -1):
        for t, tp in enumerate(degrees):
            held = drain.seconds(tp, point)
            totals = held[1:] + onward[point + 1 :, t]
            totals[-1] = held[-1]
            choice = int(np.argmin(totals))
            best[point, t], until[point, t] = totals[choice], point + 1 + choice
        for t, tp in enumerate(degrees):
            for other, to in enumerate(degrees):
                if to == tp:
                    continue
                seconds = drain.switch_seconds(point, tp, to) + best[point, other]
                if seconds < onward[point, t]:
                    onward[point, t], target[point, t] = seconds, other
    return best, onward, target, until


def describe_queueing(fingerprint: Fingerprint, batch: Batch) -> str | None:
    """A line to say if the batch would not fit: then requests would queue, which is not modelled."""
    # While the i-th longest runs, i requests have as many tokens as it.
    most = float(((np.sort(batch.length)[::-1] + batch.prompt.mean()) * np.arange(1, len(batch.length) + 1)).max())
    holds = fingerprint.kv_tokens * fingerprint.num_ranks // fingerprint.base_tp
    if most > holds:
        return f"needs up to {most:,.0f} KV tokens, the profile holds {holds:,}: requests would queue (not modelled)"
    replicas = fingerprint.num_ranks // fingerprint.degrees[0]
    fullest = -(-len(batch.length) // replicas)
    if fullest > fingerprint.max_running:
        return f"{fullest} requests a replica, the profile runs {fingerprint.max_running}: queueing is not modelled"
    return None


def _sum_running(replica: np.ndarray, last: np.ndarray, weight: np.ndarray, replicas: int, ends: int) -> np.ndarray:
    """Weight of the requests that run in each interval, by replica, ``[replicas, ends - 1]``."""
    ending = np.bincount(replica * ends + last, weight, replicas * ends).reshape(replicas, ends)
    return np.cumsum(ending[:, ::-1], axis=1)[:, ::-1][:, 1:]


def _thin_out(ends: np.ndarray, spacing: int, always: np.ndarray) -> np.ndarray:
    """The points that are kept: the first and the last of ``ends``, those in ``always``, and every one ``spacing``
    after the one kept before."""
    kept = [int(ends[0])]
    for end, keep in zip(ends[1:-1], np.isin(ends[1:-1], always), strict=True):
        if keep or end - kept[-1] >= spacing:
            kept.append(int(end))
    if len(ends) > 1:
        kept.append(int(ends[-1]))
    return np.array(kept)


class SimulatedReports:
    """What leaders report of their steps, with noise, and what is learnt from it.

    Args:
        believed: predictor of the profile that the policy has.
        noise: standard deviation of the logarithm of the measured times, independent from report to report.

    Attributes:
        factors: what is known now; kept from round to round.
        clock: seconds of all rounds so far.
    """

    def __init__(
        self, believed: StepPredictor, degrees: tuple[int, ...], noise: float, random: np.random.Generator
    ) -> None:
        self.factors, self.clock = StepFactors(degrees), 0.0
        self._believed, self._noise, self._random = believed, noise, random

    def calibrate(self, right: StepPredictor, num_ranks: int, noise: float) -> None:
        """Calibrate as an engine does before its first request; ``noise``: standard deviation of the logarithm of a
        layout's measured time in one turn."""
        degrees, turns = self.factors.degrees, list[dict[int, Steps]]()
        for each, context in TURNS:
            turn: dict[int, Steps] = {}
            for tp in degrees:
                batch = each * tp / degrees[0]
                load = tp, batch, batch * context, num_ranks / tp
                took = right.step_seconds(*load) * float(np.exp(noise * self._random.normal()))
                turn[tp] = Steps(1, batch, batch * context, took, self._believed.step_seconds(*load))
            turns.append(turn)
        self.factors.calibrate(turns, self.clock)

    def begin(self, drain: Drain) -> Callable[[int, float, int, int], None]:
        """A round: a function of (point, seconds, degree since the point before, last deal) to be called at each
        point."""
        predicted, before = dict[tuple[int, int], np.ndarray](), 0

        def reach(point: int, now: float, tp: int, dealt: int) -> None:
            nonlocal before
            if (tp, dealt) not in predicted:
                predicted[tp, dealt] = drain.compute_elapsed(self._believed, tp, dealt)
            measured, expected = (
                elapsed[:, point - dealt] - elapsed[:, before - dealt]
                for elapsed in (drain.elapsed(tp, dealt), predicted[tp, dealt])
            )
            start, end = int(drain.points[before]), int(drain.points[point])
            steps, dealt_to = end - start, drain.list_running(dealt)
            prompt, length = drain.batch.prompt[dealt_to], drain.batch.length[dealt_to]
            replica = np.arange(len(length)) % len(measured)
            generated = np.clip(length, start, end) - start  # by each request
            requests = np.bincount(replica, generated, len(measured))
            tokens = np.bincount(replica, generated * (prompt + start + generated / 2), len(measured))
            number = -(-steps // REPORT_STEPS)
            for *batch, took, ought in zip(requests, tokens, measured, expected, strict=True):
                if ought > 0:
                    for noise in np.exp(self._noise * self._random.normal(size=number)):
                        each = (float(total) / number for total in (*batch, took * noise, ought))
                        self.factors.observe(tp, Steps(steps // number, *each), self.clock + now)
            before = point

        return reach
