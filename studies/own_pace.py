"""What of the regret of ``survival`` comes of the simulator, and what of not knowing the lengths.

    python -m studies.own_pace --profile FILE [--batch N] [--seeds N]

Rounds of DeepScaleR's lengths, known to be complete, twice.  **In step** is :mod:`studies.simulate`:
at a switch the replicas that are ahead wait for the slowest.  At their **own pace**, as in an
engine, every request keeps the tokens that it has.  The oracle is then the best schedule that a
search finds from the one in step and from ``survival``'s, so that regret is a lower bound there.

``best`` knows how lengths are distributed, how many requests each replica has and how far it is,
but not the lengths: the least expected time over all policies that leave base TP2 at once, for TP4
(two replicas) or TP8 (one), by dynamic programming.  For batches of at most 128.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from scipy.special import gammaln

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Load, Policy, Snapshot
from sglang_pat.predict.profile import load
from sglang_pat.tools.commands import Parser, run
from studies.compare import ProfiledMachine, Workload
from studies.shapes import NAMED, Shape, parse_shape
from studies.simulate import Batch, Drain, SimulatedRun, find_best_run

Schedule = Sequence[tuple[float, int]]
"""Switches as (second, degree), in order."""

EVERY = 128
"""Tokens between two moments at which ``best`` may switch."""
LEADS = 41
"""Number of leads, in seconds, of one replica over the other that ``best`` tells apart."""
MOST = 128
"""Largest batch for which ``best`` is computed."""
ASK_SECONDS = 0.5
"""Seconds between two questions to a policy, later 1% of the time since the last switch."""

GAIN = 1e-5
"""Share of a round's time that a step of the search must gain."""

SWITCHES = 5
"""Switches of a schedule from which on the search puts in no other one: as many as a policy may make in a round."""


class Stretch:
    """Requests in one layout from a switch to the next, each replica at its own pace.

    Args:
        requests: numbers of those that run, int64 ``[requests]``; request i is on replica i mod R.
        done: tokens that they have, of the same shape.

    Attributes:
        seconds: from its beginning until no request is left.
    """

    def __init__(self, machine: ProfiledMachine, batch: Batch, tp: int, requests: np.ndarray, done: np.ndarray) -> None:
        self.batch, self.requests, self.done = batch, requests, done
        self.replica = requests % (machine.profile.fingerprint.num_ranks // tp)
        used = np.unique(self.replica)
        self._curves: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # seconds and steps of a replica
        left, context = batch.length[requests] - done, batch.prompt[requests] + done
        for replica in used:
            mine = np.flatnonzero(self.replica == replica)
            mine = mine[np.argsort(left[mine])]
            ends, first = np.unique(left[mine], return_index=True)
            starts = np.concatenate([[0], ends[:-1]])
            number = len(mine) - first
            held = np.cumsum(context[mine][::-1])[::-1][first] + number * (starts + ends - 1) / 2
            took = machine.predictor.step_seconds(tp, number, held, len(used)) * (ends - starts)
            seconds, steps = np.concatenate([[0.0], np.cumsum(took)]), np.concatenate([[0], ends])
            self._curves[int(replica)] = seconds, steps
        self.seconds = max((float(seconds[-1]) for seconds, _ in self._curves.values()), default=0.0)

    def list_left(self, seconds: float) -> tuple[np.ndarray, np.ndarray]:
        """Requests that are left after so many seconds, and the tokens that they have."""
        steps = {replica: int(np.interp(seconds, *curve) + 1e-6) for replica, curve in self._curves.items()}
        done = self.done + np.array([steps[replica] for replica in self.replica], dtype=np.int64)
        left = done < self.batch.length[self.requests]
        return self.requests[left], done[left]


def begin(machine: ProfiledMachine, batch: Batch) -> Stretch:
    requests = np.arange(len(batch.length))
    return Stretch(machine, batch, machine.profile.fingerprint.base_tp, requests, 0 * requests)


def run_schedule(machine: ProfiledMachine, batch: Batch, schedule: Schedule) -> float:
    """Seconds of a round at its own pace; a switch after its end is left out."""
    tp, since, stretch = machine.profile.fingerprint.base_tp, 0.0, begin(machine, batch)
    for moment, target in schedule:
        moment = max(moment, since)
        if moment - since >= stretch.seconds:
            break
        requests, done = stretch.list_left(moment - since)
        pause = machine.costs.estimate(tp, target, batch.prompt[requests] + done).seconds
        tp, since = target, moment + pause
        stretch = Stretch(machine, batch, tp, requests, done)
    return since + stretch.seconds


def run_policy(
    machine: ProfiledMachine, batch: Batch, policy: Policy, history: LengthHistory
) -> tuple[float, Schedule]:
    """Seconds of a round at its own pace, and the switches that the policy made."""
    fingerprint = machine.profile.fingerprint
    tp, since, now, stretch = fingerprint.base_tp, 0.0, 0.0, begin(machine, batch)
    running, switches, last_switch = stretch.requests, list[tuple[float, int]](), float("-inf")
    while True:
        requests, done = stretch.list_left(now - since)
        for request in np.setdiff1d(running, requests):
            length = int(batch.length[request])
            history.observe(length, int(batch.family[request]), finished=length < batch.limit)
        running = requests
        if not len(requests):
            return since + stretch.seconds, switches
        chosen = policy(
            Snapshot(
                now=now, tp=tp, degrees=tuple(fingerprint.degrees), num_ranks=fingerprint.num_ranks,
                requests=len(requests), peak=len(batch.length), last_arrival=0.0,
                last_switch=last_switch, complete=True, switches=len(switches),
                load=Load(
                    prompt=batch.prompt[requests], output=np.maximum(done, 1),
                    limit=np.full(len(requests), batch.limit), family=batch.family[requests],
                    replica=requests % (fingerprint.num_ranks // tp),
                ),
            ),
            history,
        ).tp  # fmt: skip
        if chosen == tp:
            now += max(ASK_SECONDS, 0.01 * (now - since))
            continue
        switches.append((now, chosen))
        pause = machine.costs.estimate(tp, chosen, batch.prompt[requests] + done).seconds
        tp, since = chosen, now + pause
        now = last_switch = since
        stretch = Stretch(machine, batch, tp, requests, done)


def search_best_seconds(machine: ProfiledMachine, batch: Batch, starts: Sequence[Schedule]) -> float:
    """Seconds of the best schedule found from each start: switches are moved, taken out, put in."""
    found = np.inf
    for start in starts:
        schedule, seconds = list(start), run_schedule(machine, batch, start)
        width, least = seconds / 6, seconds / 400
        while width > least:
            better = False
            for other in _list_neighbours(machine, schedule, width, seconds):
                took = run_schedule(machine, batch, other)
                if took < seconds * (1 - GAIN):
                    schedule, seconds, better = other, took, True
            width = width if better else width / 2
        found = min(found, seconds)
    return found


def _list_neighbours(
    machine: ProfiledMachine, schedule: list[tuple[float, int]], width: float, seconds: float
) -> list[list[tuple[float, int]]]:
    fingerprint = machine.profile.fingerprint
    others = [schedule[:place] + schedule[place + 1 :] for place in range(len(schedule))]
    for (moment, tp), without in zip(schedule, list(others), strict=True):
        others += [[*without, (max(moment + by, 0.0), tp)] for by in (-width, width)]
    if width > seconds / 30 and len(schedule) < SWITCHES:
        moments = np.arange(width / 2, seconds, 1.5 * width).tolist()
        others += [[*schedule, (moment, tp)] for moment in moments for tp in fingerprint.degrees]
    result: list[list[tuple[float, int]]] = []
    for other in others:
        other.sort()
        before = [fingerprint.base_tp, *(tp for _, tp in other)]
        result.append([one for one, tp in zip(other, before, strict=False) if one[1] != tp])
    return result


class BestPolicy:
    """The policy of least expected time from TP4 and TP8 on.

    The state in TP4 is the requests of each replica and the seconds by which one is behind; in TP8
    it is the number of requests.

    Args:
        own_pace: at a switch the tokens by which a replica is ahead are not lost.

    Attributes:
        first: degree in which it begins.
    """

    def __init__(self, machine: ProfiledMachine, shape: Shape, batch: int, prompt: int, own_pace: bool) -> None:
        self._machine, self._prompt, self._half = machine, prompt, -(-batch // 2)
        ends = np.arange(0, shape.limit + EVERY, EVERY)
        quantiles = np.sort(shape.quantile((np.arange(400_000) + 0.5) / 400_000))
        survival = 1 - np.searchsorted(quantiles, ends, side="right") / len(quantiles)
        survival[ends >= shape.limit] = 0.0
        number, half = np.arange(batch + 1), np.arange(self._half + 1)
        both = half[:, None] + half
        self._leads = self._spread_leads(shape)
        low, high = np.minimum(self._leads, 0)[:, None, None], np.minimum(-self._leads, 0)[:, None, None]
        ahead = (half[:, None] * low + half * high) / np.maximum(both, 1) if own_pace else 0.0
        to_go4, to_go8 = np.zeros((LEADS, len(half), len(half))), np.zeros(batch + 1)
        self._leave4 = np.zeros((len(ends) - 1, LEADS, len(half), len(half)), dtype=bool)
        self._leave8 = np.zeros((len(ends) - 1, batch + 1), dtype=bool)
        for point in range(len(ends) - 2, -1, -1):
            stays = survival[point + 1] / survival[point] if survival[point] > 0 else 0.0
            left = _compute_binomial(batch, stays)
            to_go4 = left[: len(half), : len(half)] @ to_go4 @ left[: len(half), : len(half)].T
            running = {replicas: self._estimate(number, stays, int(ends[point]), replicas) for replicas in (0, 1, 2)}
            one, two = running[1][: len(half)], running[2][: len(half)]
            alone = (half[:, None] == 0) | (half == 0)
            mine, other = (np.where(alone, a, b) for a, b in ((one[:, None], two[:, None]), (one, two)))
            hold4 = np.maximum(low + mine, high + other) + self._shift(to_go4, mine - other)
            hold8 = running[0] + left @ to_go8
            raised, lowered = (self._price(number, int(ends[point]), *pair) for pair in ((4, 8), (8, 4)))
            raised = np.pad(raised + hold8, (0, 2 * self._half - batch), mode="edge")[both] + ahead
            lowered = lowered + hold4[LEADS // 2, (number + 1) // 2, number // 2]
            self._leave4[point], self._leave8[point] = raised < hold4, lowered < hold8
            to_go4, to_go8 = np.minimum(raised, hold4), np.minimum(lowered, hold8)
            to_go4[:, 0, 0] = to_go8[0] = 0.0
        entered = {4: to_go4[LEADS // 2, batch - batch // 2, batch // 2], 8: to_go8[batch]}
        pause = {tp: machine.costs.estimate(2, tp, np.full(batch, prompt)).seconds for tp in entered}
        self.first = min(entered, key=lambda tp: entered[tp] + pause[tp])

    def _spread_leads(self, shape: Shape) -> np.ndarray:
        """Leads in seconds, ascending, denser about 0, as far as an eighth of a round."""
        most = shape.limit * float(self._machine.predictor.step_seconds(4, 4.0, 4.0 * 8192, 2)) / 8
        unit = np.linspace(-1, 1, LEADS)
        return most * np.sign(unit) * unit**2

    def _estimate(self, number: np.ndarray, stays: float, tokens: int, replicas: int) -> np.ndarray:
        """Seconds of an interval by requests of a replica: of TP8, or beside so many of TP4."""
        share = np.sqrt(stays) if stays > 0 else 1.0
        middle = np.maximum(number * share, 1.0)
        context = middle * (self._prompt + tokens + EVERY / 2)
        step = self._machine.predictor.step_seconds(4 if replicas else 8, middle, context, replicas or 1)
        return EVERY * step * (1 - (1 - share) ** number)

    def _price(self, number: np.ndarray, tokens: int, source: int, target: int) -> np.ndarray:
        some = np.unique(np.geomspace(1, number[-1], 24).round().astype(int))
        contexts = [np.full(count, self._prompt + tokens) for count in some]
        seconds = [self._machine.costs.estimate(source, target, each).seconds for each in contexts]
        return np.interp(number, some, seconds)

    def _shift(self, to_go: np.ndarray, by: np.ndarray) -> np.ndarray:
        """``to_go`` at leads that are ``by`` seconds larger."""
        leads = np.clip(self._leads[:, None, None] + by, self._leads[0], self._leads[-1])
        below = np.clip(np.searchsorted(self._leads, leads, side="right") - 1, 0, LEADS - 2)
        share = (leads - self._leads[below]) / (self._leads[below + 1] - self._leads[below])
        low, high = (np.take_along_axis(to_go, place, axis=0) for place in (below, below + 1))
        return (1 - share) * low + share * high

    def choose(self, tp: int, tokens: int, counts: np.ndarray, lead: float) -> int:
        """The degree to be in; ``lead``: seconds by which the first replica of TP4 is behind."""
        point = min(tokens // EVERY, len(self._leave8) - 1)
        if tp == 8:
            return 4 if self._leave8[point, counts[0]] else 8
        if tp != 4:
            return self.first
        place = int(np.abs(self._leads - lead).argmin())
        first, second = np.minimum(counts, self._half)
        return 8 if self._leave4[point, place, first, second] else 4

    def decide(self, snapshot: Snapshot, history: LengthHistory) -> Decision:
        """The decision at the own pace: the replica with fewer tokens is behind."""
        output, replica = snapshot.load.output, snapshot.load.replica
        counts = np.bincount(replica, minlength=snapshot.num_ranks // snapshot.tp)
        tokens, lead = int(output.min()), 0.0
        if snapshot.tp == 4 and counts.all():
            has = [int(output[replica == each].max()) for each in (0, 1)]
            fast = int(has[1] > has[0])
            held = float(counts[fast] * (self._prompt + has[fast]))
            lead = (has[1] - has[0]) * self._machine.predictor.step_seconds(4, float(counts[fast]), held, 2)
        return Decision(tp=self.choose(snapshot.tp, tokens, counts, lead))

    def run_in_step(self, drain: Drain) -> SimulatedRun:
        since = 0

        def decide(point: int, now: float, tp: int, last_switch: float, dealt: int) -> int:
            nonlocal since
            elapsed = drain.elapsed(tp, dealt)
            passed = elapsed[:, point - dealt] - elapsed[:, since - dealt]
            replica = np.searchsorted(drain.list_running(dealt), drain.list_running(point)) % len(passed)
            counts = np.bincount(replica, minlength=len(passed))
            chosen = self.choose(tp, int(drain.points[point]), counts, float(passed[0] - passed[-1]))
            since = point if chosen != tp else since
            return chosen

        return drain.drive(decide, deals=True)


def _compute_binomial(most: int, stays: float) -> np.ndarray:
    """Probability that of so many (row) as many (column) are left, each with ``stays``."""
    number = np.arange(most + 1)
    ended = number[:, None] - number
    if not 0 < stays < 1:
        return np.eye(most + 1) if stays else np.repeat(np.eye(1, most + 1), most + 1, axis=0)
    ways = gammaln(number + 1)[:, None] - gammaln(number + 1) - gammaln(np.maximum(ended, 0) + 1)
    return np.where(ended >= 0, np.exp(ways + number * np.log(stays) + ended * np.log1p(-stays)), 0.0)


def list_moments(drain: Drain, found: SimulatedRun) -> list[tuple[float, int]]:
    """A schedule by seconds of a run in step."""
    now, since, result = 0.0, 0, list[tuple[float, int]]()
    for tokens, tp, target, pause in found.switches:
        point = int(np.searchsorted(drain.points, tokens))
        now += float(drain.seconds(tp, since)[point - since])
        result.append((now, target))
        now, since = now + pause, point
    return result


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m studies.own_pace", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", metavar="FILE", required=True)
    parser.add_argument("--lengths", metavar="SHAPE", default="deepscaler", help=f"one of {', '.join(NAMED)}, …")
    parser.add_argument("--batch", type=int, default=128, help="responses a round (default 128)")
    parser.add_argument("--seeds", type=int, default=10, help="three rounds each (default 10)")
    args = parser.parse_args(argv)
    machine, shape = ProfiledMachine(load(args.profile, complete=True)), parse_shape(args.lengths)
    workload = Workload(shape=shape, batch=args.batch)
    known = args.batch <= MOST and tuple(machine.profile.fingerprint.degrees) == (2, 4, 8)
    best = [BestPolicy(machine, shape, args.batch, workload.prompt, own) for own in (False, True)] if known else []
    rows: list[list[float]] = []
    for seed in range(args.seeds):
        survival, histories = machine.make_policy("survival"), (LengthHistory(), LengthHistory())
        for batch in Workload(shape=shape, batch=args.batch, rounds=3, seed=seed).make_batches():
            drain = machine.drain(batch)
            oracle, ours = find_best_run(drain), drain.run_policy(survival, histories[0], complete=True)
            seconds, switches = run_policy(machine, batch, survival, histories[1])
            least = search_best_seconds(machine, batch, (list_moments(drain, oracle), switches))
            row = [ours.seconds / oracle.seconds, seconds / least]
            if best:
                row.append(best[0].run_in_step(drain).seconds / oracle.seconds)
                row.append(run_policy(machine, batch, best[1].decide, LengthHistory())[0] / least)
            rows.append(row)
    regret = np.array(rows) - 1
    console = Console(highlight=False)
    names = ("survival, in step", "survival, own pace", "best, in step", "best, own pace")
    for name, values in zip(names, regret.T, strict=False):
        error = values.std() / len(values) ** 0.5
        console.print(f"{name}: regret {values.mean():.2%} ± {error:.2%}, worst round {values.max():.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(run("studies.own_pace", main))
