"""A step of a training job: a round whose ranks may be lent to the trainer, then the rest of the training on all.

The round is that of :mod:`studies.simulate`, on all ranks or on half of them; a lending, a return and a switch come at
one token index for all.  The trainer takes whole groups, one after another, as they are complete; on half of the ranks
one takes twice as long.  Before ranks are taken back it finishes the group that it has begun.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from sglang_pat.policies.lending import STRIDE, LendingPolicy, Move, Training
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Policy, Snapshot
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor
from sglang_pat.predict.profile import Fingerprint
from studies.simulate import Batch, Drain, solve

ASK_SECONDS = 0.5
"""Seconds between two questions to the policy while ranks are lent."""


@dataclass
class SimulatedStep:
    """What happened, in seconds.

    Attributes:
        seconds: of the step; ``rollout``: up to the last response.
        hidden: of the training on all ranks, what was done before.
        lent: from when to when, since the start; None if never.  ``at``: the token indices of both.
        overfull: most KV tokens on the ranks that stayed, over their room.
        switches: as (seconds, degree).
    """

    seconds: float = 0.0
    rollout: float = 0.0
    hidden: float = 0.0
    lent: tuple[float, float] | None = None
    at: tuple[int, int] = (0, 0)
    overfull: float = 0.0
    switches: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class SimulatedTrainer:
    """Whole groups, trained one after another while ranks are lent.  Seconds of training are those on all ranks.

    Attributes:
        begun: seconds of training that were begun on lent ranks.
        free: when they will have done what they have begun; infinite while none are lent.
        since: when they were lent last.
        taken: seconds of training of all groups so far.
    """

    def __init__(self) -> None:
        self._ready: list[tuple[float, float]] = []
        self.begun, self.free, self.since, self.taken = 0.0, np.inf, np.inf, 0.0
        self._has_begun = False

    def lend(self, now: float, setup: float) -> None:
        """Lend ranks from now on; the first token is trained ``setup`` seconds later at the earliest."""
        self.since, self.free, self._has_begun = now, now + setup, False

    def take_back(self) -> None:
        """Let no ranks be lent."""
        self.since = self.free = np.inf

    def add(self, seconds: float, now: float) -> None:
        """Add a group that is complete, and has its rewards, at ``now``."""
        heapq.heappush(self._ready, (now, seconds))
        self.taken += seconds

    def get_ready_seconds(self, now: float) -> float:
        """Seconds of training of the groups that have come and were not begun."""
        return sum(seconds for came, seconds in self._ready if came <= now)

    def advance(self, now: float) -> None:
        """Begin what can be begun before ``now``."""
        while self._ready and max(self.free, self._ready[0][0]) < now:
            came, seconds = heapq.heappop(self._ready)
            self.free = max(self.free, came) + STRIDE * seconds
            self.begun += seconds
            self._has_begun = True

    def is_training(self, now: float) -> bool:
        """Whether a group is under way on lent ranks: then its client asks nothing."""
        return self._has_begun and now < self.free < np.inf

    def count_done_seconds(self, now: float) -> float:
        """Seconds of the training that was begun, without what is still under way."""
        return self.begun - self._count_under_way(now)

    def _count_under_way(self, now: float) -> float:
        return max(self.free - now, 0.0) / STRIDE if self.begun and np.isfinite(self.free) else 0.0

    def describe(self, now: float, seconds_per_token: float) -> dict[str, Any]:
        """Fields of :class:`Training` that say what was done on lent ranks; none while none are lent."""
        if now < self.since:
            return {}
        done = self.count_done_seconds(now)
        return {"lent": now - self.since, "busy": STRIDE * done, "trained": int(done / max(seconds_per_token, 1e-12))}

    def finish(self, now: float) -> tuple[float, float]:
        """Seconds, after the round, in which all ranks wait for a reward, and in which they train what is left, in the
        order in which rewards come."""
        training, waiting = self._count_under_way(now), 0.0
        for came, seconds in sorted(self._ready):
            waiting = max(waiting, came - now - training)
            training += seconds
        return waiting, training


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where a step is: number of a point, seconds, degree in force, end of the last switch, whether ranks are lent."""

    point: int
    now: float
    tp: int
    last_switch: float
    lent: bool
    trainer: SimulatedTrainer


LayoutChoice = Callable[[Moment], int]
"""A choice of the degree to be in; asked at every point."""

LendingChoice = Callable[[Moment], Move]
"""A choice of what to do with the ranks; asked at every point."""


def never_lend(moment: Moment) -> Move:
    return Move.NEVER


class StepReplay:
    """A batch on one profile, with the training that follows.

    Args:
        seconds_per_token: of training on all ranks.
        setup: seconds between a lending and the first token that is trained.
        spacing: token steps between two points, about.
    """

    def __init__(
        self,
        predictor: StepPredictor,
        costs: SwitchCosts,
        fingerprint: Fingerprint,
        batch: Batch,
        *,
        seconds_per_token: float,
        setup: float,
        spacing: int,
    ) -> None:
        self.costs, self.fingerprint, self.batch = costs, fingerprint, batch
        self.seconds_per_token, self.setup = seconds_per_token, setup
        half = fingerprint.num_ranks // STRIDE
        usable = tuple(tp for tp in fingerprint.degrees if half % tp == 0)
        self.whole = Drain(predictor, costs, fingerprint, batch, spacing)
        lent = msgspec.structs.replace(fingerprint, num_ranks=half, degrees=usable)
        self.half = Drain(predictor, costs, lent, batch, spacing)
        self.points = self.whole.points
        self.room = {tp: fingerprint.kv_tokens * tp // fingerprint.base_tp for tp in fingerprint.degrees}  # a replica's
        # The point at which each group is complete, and its tokens.
        families, place = np.unique(batch.family, return_inverse=True)
        longest = np.zeros(len(families), dtype=np.int64)
        np.maximum.at(longest, place, batch.length)
        self.complete_at = np.searchsorted(self.points, longest)
        self.tokens = np.bincount(place, batch.prompt + batch.length).astype(float)
        self.sizes = np.bincount(place)
        self.ended_at = np.searchsorted(self.points, batch.length)
        self._moves: dict[tuple[int, int], float] = {}
        self._chosen: dict[tuple[int, int, float, float, bool], int] = {}
        """Degrees chosen, by what a policy saw."""

    @property
    def training_seconds(self) -> float:
        return self.seconds_per_token * float(self.tokens.sum())

    def move_seconds(self, point: int, tp: int) -> float:
        """Pause of a lending or a return at a point, as the policy's costs have it."""
        if (point, tp) not in self._moves:
            self._moves[point, tp] = self.costs.estimate_lending(tp, self._list_lengths(point)).seconds
        return self._moves[point, tp]

    def recompute_seconds(self, point: int, tp: int) -> float:
        """Seconds of a lending at a point where the KV of half of the requests is computed anew."""
        lengths = np.sort(self._list_lengths(point))[1::2]
        replicas = min(self.half.fingerprint.num_ranks // tp, len(lengths))
        if not replicas or not self.costs.predictor.has_prefill(tp):
            return 0.0
        rms = float(np.sqrt(np.mean(lengths.astype(float) ** 2)))
        return self.costs.predictor.prefill_uniform(tp, -(-len(lengths) // replicas), rms, replicas)

    def _list_lengths(self, point: int) -> np.ndarray:
        return self.batch.prompt[self.whole.list_running(point)] + self.points[point]

    def get_half_degree(self, tp: int) -> int:
        return max(degree for degree in self.half.degrees if degree <= max(tp, self.half.degrees[0]))

    def run(self, choose_tp: LayoutChoice, choose_lending: LendingChoice, recompute: bool = False) -> SimulatedStep:
        """A step; ``recompute``: a lending computes the KV that it would move."""
        step, trainer = SimulatedStep(), SimulatedTrainer()
        drain, tp, begun, since, last = self.whole, self.whole.degrees[0], 0.0, 0, float("-inf")
        elapsed = drain.seconds(tp, 0)
        order = np.argsort(self.complete_at, kind="stable")
        fed, lent, closing, start = 0, False, False, 0.0
        half_room = self.room[self.half.degrees[0]] * (self.half.fingerprint.num_ranks // self.half.degrees[0])
        for point in range(len(self.points)):
            now = begun + float(elapsed[point - since])
            if lent and not closing:
                trainer.advance(now)
            while fed < len(order) and self.complete_at[order[fed]] <= point:
                trainer.add(self.seconds_per_token * float(self.tokens[order[fed]]), now)
                fed += 1
            if point == len(self.points) - 1:
                break
            moment = Moment(point=point, now=now, tp=tp, last_switch=last, lent=lent, trainer=trainer)
            move = choose_lending(moment)
            closing = closing or (lent and move is Move.TAKE_BACK)
            pause, to, moved = 0.0, tp, True
            if move is Move.LEND and not lent:
                to = self.get_half_degree(tp)
                pause = self.recompute_seconds(point, to) if recompute else self.move_seconds(point, tp)
                drain, lent, start = self.half, True, now + pause
                trainer.lend(start, self.setup)
                step.at = int(self.points[point]), 0
            elif closing and lent and trainer.free <= now:
                pause = self.move_seconds(point, tp)
                drain, lent = self.whole, False
                step.lent, step.at = (start, now + pause), (step.at[0], int(self.points[point]))
                trainer.take_back()
            else:
                to = choose_tp(moment)
                moved = to != tp
                if moved:
                    pause = drain.switch_seconds(point, tp, to)
                    step.switches.append((now, to))
            if lent:
                step.overfull = max(step.overfull, float(self._list_lengths(point).sum()) / half_room)
            if moved:
                begun = last = now + pause
                tp, since, elapsed = to, point, drain.seconds(to, point)
        step.rollout = begun + float(elapsed[-1])
        if lent:
            step.lent, step.at = (start, step.rollout), (step.at[0], int(self.points[-1]))
        step.hidden = trainer.count_done_seconds(step.rollout)
        step.seconds = step.rollout + self.training_seconds - step.hidden
        return step

    # -- what decides ----------------------------------------------------------------------------------

    def run_static(self, tp: int, share: float | None = None) -> SimulatedStep:
        """One degree to the end; half of the ranks lent when this share of the requests has ended, as in RollPacker's
        artifact: KV is computed anew, and ranks come back at the end.  None: never."""
        lending = never_lend if share is None else self._lend_at(share)
        return self.run(lambda moment: tp, lending, recompute=True)

    def _lend_at(self, share: float) -> LendingChoice:
        """A choice that lends when this share of the requests has ended, whatever it costs, until the round is over."""

        def choose_lending(moment: Moment) -> Move:
            ended = np.count_nonzero(self.ended_at <= moment.point)
            return Move.LEND if ended >= share * len(self.batch.length) else Move.WAIT

        return choose_lending

    def run_policies(
        self,
        layouts: Policy,
        lending: LendingPolicy | None,
        history: LengthHistory,
        share: float | None = None,
        believe: Callable[[Training], Training] | None = None,
    ) -> SimulatedStep:
        """A step with a policy for the degree, and one for lending (None: never; with ``share``: at this share of the
        requests).  They see, and ``history`` learns, what an engine and its client would; ``believe``: what a client
        says of the training that is known right.

        ``layouts`` and what ``history`` has learnt before are the same each time: what was decided in a run of this
        batch holds for the next one, as far as both see the same.
        """
        order = np.argsort(self.batch.length, kind="stable")
        reported, asked, complete, returned = 0, float("-inf"), 0, False

        def choose_tp(moment: Moment) -> int:
            nonlocal reported
            while self.batch.length[order[reported]] <= self.points[moment.point]:
                self.learn(history, order[reported])
                reported += 1
            seen = moment.point, moment.tp, moment.now, moment.last_switch, moment.lent
            if seen not in self._chosen:
                self._chosen[seen] = layouts(self.make_snapshot(moment), history).tp
            return self._chosen[seen]

        def choose_lending(moment: Moment) -> Move:
            nonlocal asked, complete, returned
            if lending is None:
                return Move.NEVER
            if moment.trainer.is_training(moment.now):
                return Move.WAIT
            before, complete = complete, self.count_complete(moment.point)
            if moment.now - asked < ASK_SECONDS if moment.lent else complete == before:
                return Move.WAIT
            asked = moment.now
            told = self.describe_training(moment, returned)
            move = lending(self.make_snapshot(moment), history, believe(told) if believe else told).move
            returned = returned or (moment.lent and move is Move.TAKE_BACK)
            return move

        step = self.run(choose_tp, choose_lending if share is None else self._lend_at(share))
        for request in order[reported:]:
            self.learn(history, request)
        return step

    def learn(self, history: LengthHistory, request: int) -> None:
        length = int(self.batch.length[request])
        history.observe(length, int(self.batch.family[request]), finished=length < self.batch.limit)

    def count_complete(self, point: int) -> int:
        """Samples of complete groups."""
        return int(self.sizes[self.complete_at <= point].sum())

    def make_snapshot(self, moment: Moment) -> Snapshot:
        """What a policy sees, of the ranks that work."""
        drain = self.half if moment.lent else self.whole
        seen = drain.make_snapshot(moment.point, moment.now, moment.tp, moment.last_switch, complete=True)
        return replace(seen, room=self.room)

    def describe_training(self, moment: Moment, returned: bool) -> Training:
        """What the client knows of this step."""
        ended = self.ended_at <= moment.point
        held = int((self.batch.prompt + self.batch.length)[ended].sum())
        ready = moment.trainer.get_ready_seconds(moment.now)
        return Training(
            samples=len(self.batch.length),
            complete=self.count_complete(moment.point),
            ready=round(ready / self.seconds_per_token) if ready else 0,
            pending=held - round(float(self.tokens[self.complete_at <= moment.point].sum())),
            seconds_per_token=self.seconds_per_token,
            setup=self.setup,
            returned=returned,
            elapsed=moment.now,
            **moment.trainer.describe(moment.now, self.seconds_per_token),
        )

    # -- the oracle ------------------------------------------------------------------------------------

    def run_best(self, moments: int = 60) -> SimulatedStep:
        """The best step for one who knows all lengths: the best moments to lend and to take back, and the best layouts
        around them.

        Args:
            moments: so many are tried for the one, and for each of them for the other.
        """
        plain, half, last = _Best(self.whole), _Best(self.half), len(self.points) - 1
        before = plain.follow(0, self.whole.degrees[0])
        arrived = np.zeros(last + 1)
        np.add.at(arrived, self.complete_at, self.seconds_per_token * self.tokens)
        arrived = np.cumsum(arrived)
        seconds_by_moments: dict[tuple[int, int], float] = {}
        onward: dict[int, _Path] = {}
        for start in _spread_moments(0, last - 1, moments):
            tp = int(before.degrees[start])
            onward[start] = way = half.follow(start, self.get_half_degree(tp))
            begun = float(before.seconds[start]) + self.move_seconds(start, tp)
            since = np.maximum(way.seconds - self.setup, 0.0) / STRIDE
            # What is trained by a moment: all that had come by some earlier one, and without a pause from there on.
            hidden = np.minimum(since, np.minimum.accumulate(arrived[start:] - since) + since)
            for stop in _spread_moments(start, last, moments):
                held = int(way.degrees[stop - start])
                back = self.move_seconds(stop, held) if stop < last else 0.0
                seconds_left = back + plain.get_to_go(stop, held) - float(hidden[stop - start])
                seconds_by_moments[start, stop] = begun + float(way.seconds[stop - start]) + seconds_left
        start, stop = min(seconds_by_moments, key=lambda moment: seconds_by_moments[moment], default=(0, 0))
        if not seconds_by_moments or seconds_by_moments[start, stop] >= before.seconds[-1]:
            return self.run(lambda moment: int(before.held[moment.point]), never_lend)
        return self._run_schedule(before, onward[start], plain, start, stop)

    def _run_schedule(self, before: _Path, onward: _Path, plain: _Best, start: int, stop: int) -> SimulatedStep:
        """Ranks are lent at one point, and taken back at another one or as soon as the trainer lets them go."""
        back = stop
        after: _Path | None = None

        def choose_tp(moment: Moment) -> int:
            nonlocal after, back
            if moment.point < start:
                return int(before.held[moment.point])
            if moment.lent:
                return int(onward.held[moment.point - start])
            if after is None:
                after, back = plain.follow(moment.point, moment.tp), moment.point
            return int(after.held[moment.point - back])

        def choose_lending(moment: Moment) -> Move:
            if moment.lent:
                return Move.TAKE_BACK if moment.point >= stop else Move.WAIT
            return Move.LEND if moment.point == start else Move.WAIT

        return self.run(choose_tp, choose_lending)


def _spread_moments(first: int, last: int, count: int) -> list[int]:
    """Points spread evenly over ``first`` to ``last``, with both ends."""
    return np.unique(np.linspace(first, last, count).round().astype(int)).tolist() if last >= first else []


@dataclass(frozen=True)
class _Path:
    """Seconds from a point on up to each later point, and the degrees in force before and after a switch there."""

    seconds: np.ndarray
    degrees: np.ndarray
    held: np.ndarray


class _Best:
    """The best schedule from any point and layout of a drain."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._best, self._onward, self._target, self._until = solve(drain)

    def get_to_go(self, point: int, tp: int) -> float:
        at = self._drain.degrees.index(tp)
        if point == len(self._drain.points) - 1:
            return 0.0
        return float(min(self._best[point, at], self._onward[point, at]))

    def follow(self, point: int, tp: int) -> _Path:
        drain, last = self._drain, len(self._drain.points) - 1
        at, begun, start = drain.degrees.index(tp), 0.0, point
        seconds, degrees, held = (
            np.zeros(last + 1 - point),
            np.zeros(last + 1 - point, int),
            np.zeros(last + 1 - point, int),
        )
        degrees[0] = tp
        if point < last and self._onward[point, at] < self._best[point, at]:
            to = int(self._target[point, at])
            begun += drain.switch_seconds(point, drain.degrees[at], drain.degrees[to])
            at = to
        while point < last:
            until = int(self._until[point, at])
            took = drain.seconds(drain.degrees[at], point)[: until - point + 1]
            seconds[point - start + 1 : until - start + 1] = begun + took[1:]
            held[point - start : until - start] = drain.degrees[at]
            degrees[point - start + 1 : until - start + 1] = drain.degrees[at]
            begun += float(took[-1])
            point = until
            if point < last:
                to = int(self._target[point, at])
                begun += drain.switch_seconds(point, drain.degrees[at], drain.degrees[to])
                at = to
        held[-1] = degrees[-1]
        return _Path(seconds, degrees, held)
