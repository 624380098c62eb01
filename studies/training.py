"""A step of a training job: a round whose ranks may be lent to the trainer, then the rest of the training on all.

The round is that of :mod:`studies.simulate`, on all ranks or on half of them; a lending, a return and a switch come at
one token index for all.  The trainer takes whole groups, one after another, as they are complete; on half of the ranks
one takes twice as long.  Before ranks are taken back it finishes the group that it has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from sglang_pat.policies.lending import STRIDE, LendingPolicy, Move, Training, count_milestones
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Policy, Snapshot
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor
from sglang_pat.predict.profile import Fingerprint
from studies.simulate import Batch, Drain, solve

ASK_SECONDS = 0.5
"""Between two questions to the policy while ranks are lent."""


@dataclass
class Step:
    """What happened, in seconds.

    Attributes:
        seconds: of the step; ``rollout``: up to the last response.
        hidden: of the training on all ranks, what was done before.
        lent: from when to when, since the start; none if never.
        overfull: most KV tokens on the ranks that stayed, over their room.
    """

    seconds: float = 0.0
    rollout: float = 0.0
    hidden: float = 0.0
    lent: tuple[float, float] | None = None
    at: tuple[int, int] = (0, 0)
    overfull: float = 0.0
    switches: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class Trainer:
    """Groups that are complete, in seconds of training on all ranks each; trained in turn on lent ranks."""

    def __init__(self) -> None:
        self.ready: deque[tuple[float, float]] = deque()
        self.begun, self.free = 0.0, np.inf

    def add(self, seconds: float, now: float) -> None:
        self.ready.append((now, seconds))

    def advance(self, now: float) -> None:
        """Begin what can be begun before ``now``."""
        while self.ready and self.free < now:
            came, seconds = self.ready.popleft()
            self.free = max(self.free, came) + STRIDE * seconds
            self.begun += seconds


class StepReplay:
    """A batch on one profile, with the training that follows.

    Args:
        seconds_per_token: of training on all ranks.
        setup: seconds between a lending and the first token that is trained.
        group: responses to a prompt.
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

    @property
    def training_seconds(self) -> float:
        return self.seconds_per_token * float(self.tokens.sum())

    def move_seconds(self, point: int, tp: int) -> float:
        """Pause of a lending or a return at a point, as the policy's costs have it."""
        if (point, tp) not in self._moves:
            self._moves[point, tp] = self.costs.estimate_lending(tp, self._list_lengths(point)).seconds
        return self._moves[point, tp]

    def recompute_seconds(self, point: int, tp: int) -> float:
        """Of a lending at a point where the KV of half of the requests is computed anew."""
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

    def run(
        self,
        choose_tp: Callable[[int, float, int, float, bool], int],
        choose_lending: Callable[[int, float, int, bool, Trainer], Move],
        recompute: bool = False,
    ) -> Step:
        """A step.

        Args:
            choose_tp: the degree to be in, for (point, now, degree in force, end of the last switch, ranks are lent).
            choose_lending: for (point, now, degree, ranks are lent, trainer).
            recompute: a lending computes the KV that it would move.
        """
        step, trainer = Step(), Trainer()
        drain, tp, begun, since, last = self.whole, self.whole.degrees[0], 0.0, 0, float("-inf")
        elapsed = drain.seconds(tp, 0)
        order = np.argsort(self.complete_at, kind="stable")
        fed, lent, closing, start = 0, False, False, 0.0
        half_room = self.room[self.half.degrees[0]] * (self.half.fingerprint.num_ranks // self.half.degrees[0])
        for point in range(len(self.points)):
            now = begun + float(elapsed[point - since])
            trainer.advance(now if not closing else -np.inf)
            while fed < len(order) and self.complete_at[order[fed]] <= point:
                trainer.add(self.seconds_per_token * self.tokens[order[fed]], now)
                fed += 1
            if point == len(self.points) - 1:
                break
            move = choose_lending(point, now, tp, lent, trainer)
            closing = closing or (lent and move is Move.TAKE_BACK)
            pause, to = 0.0, tp
            if move is Move.LEND and not lent:
                to = self.get_half_degree(tp)
                pause = self.recompute_seconds(point, to) if recompute else self.move_seconds(point, tp)
                drain, lent, start = self.half, True, now + pause
                trainer.free, step.at = start + self.setup, (int(self.points[point]), 0)
            elif closing and lent and trainer.free <= now:
                pause = self.move_seconds(point, tp)
                drain, lent = self.whole, False
                step.lent, step.at = (start, now + pause), (step.at[0], int(self.points[point]))
                trainer.free = np.inf
            else:
                to = choose_tp(point, now, tp, last, lent)
                if to != tp:
                    pause = drain.switch_seconds(point, tp, to)
                    step.switches.append((now, to))
            if lent:
                step.overfull = max(step.overfull, float(self._list_lengths(point).sum()) / half_room)
            if to != tp or pause or drain is self.half and start == now + pause:
                begun = last = now + pause
                tp, since, elapsed = to, point, drain.seconds(to, point)
        step.rollout = begun + float(elapsed[-1])
        under_way = max(trainer.free - step.rollout, 0.0) / STRIDE if lent else 0.0
        if lent:
            step.lent, step.at = (start, step.rollout), (step.at[0], int(self.points[-1]))
        step.hidden = trainer.begun - under_way
        step.seconds = step.rollout + self.training_seconds - step.hidden
        return step

    # -- what decides ----------------------------------------------------------------------------------

    def run_static(self, tp: int, share: float | None = None) -> Step:
        """One degree to the end; half of the ranks lent when this share of the requests has ended, as in RollPacker's
        artifact: KV is computed anew, and ranks come back at the end.  None: never."""
        requests = len(self.batch.length)

        def choose_lending(point: int, now: float, tp: int, lent: bool, trainer: Trainer) -> Move:
            over = share is not None and np.count_nonzero(self.ended_at <= point) >= share * requests
            return Move.LEND if over and not lent else Move.WAIT

        return self.run(lambda *_: tp, choose_lending, recompute=True)

    def run_policies(self, layouts: Policy, lending: LendingPolicy | None, history: LengthHistory) -> Step:
        """With a policy for the degree, and one for lending (None: never).  They see, and ``history`` learns, what an
        engine and its client would."""
        order = np.argsort(self.batch.length, kind="stable")
        reported, asked, passed, returned = 0, float("-inf"), 0, False

        def choose_tp(point: int, now: float, tp: int, last: float, lent: bool) -> int:
            nonlocal reported
            while self.batch.length[order[reported]] <= self.points[point]:
                self.learn(history, order[reported])
                reported += 1
            return layouts(self.make_snapshot(point, now, tp, last, lent), history).tp

        def choose_lending(point: int, now: float, tp: int, lent: bool, trainer: Trainer) -> Move:
            nonlocal asked, passed, returned
            if lending is None:
                return Move.NEVER
            complete = int(self.sizes[self.complete_at <= point].sum())
            milestones = count_milestones(complete / len(self.batch.length))
            if now - asked < ASK_SECONDS if lent else milestones == passed:
                return Move.WAIT
            asked, passed = now, milestones
            if self.whole.list_running(point).size == 0:
                return Move.NEVER
            ended = self.ended_at <= point
            held = float((self.batch.prompt + self.batch.length)[ended].sum())
            seen = self.make_snapshot(point, now, tp, float("-inf"), lent)
            known = Training(
                samples=len(self.batch.length), complete=complete,
                ready=round(sum(seconds for _, seconds in trainer.ready) / self.seconds_per_token),
                pending=round(held - float(self.tokens[self.complete_at <= point].sum())),
                seconds_per_token=self.seconds_per_token, setup=self.setup, returned=returned,
            )  # fmt: skip
            move = lending(seen, history, known).move
            returned = returned or (lent and move is Move.TAKE_BACK)
            return move

        step = self.run(choose_tp, choose_lending)
        for request in order[reported:]:
            self.learn(history, request)
        return step

    def learn(self, history: LengthHistory, request: int) -> None:
        length = int(self.batch.length[request])
        history.observe(length, int(self.batch.family[request]), finished=length < self.batch.limit)

    def make_snapshot(self, point: int, now: float, tp: int, last: float, lent: bool) -> Snapshot:
        """What a policy sees at a point, of the ranks that work."""
        drain = self.half if lent else self.whole
        return replace(drain.make_snapshot(point, now, tp, last, complete=True), room=self.room)

    # -- the oracle ------------------------------------------------------------------------------------

    def run_best(self, starts: int = 60) -> Step:
        """The best moments to lend and to take back, for one who knows all lengths and takes the best layouts."""
        plain, half = _Best(self.whole), _Best(self.half)
        path = plain.follow(0, self.whole.degrees[0], first=True)
        best, schedule = path.seconds[-1] + self.training_seconds, (path, None, None, 0, 0)
        last = len(self.points) - 1
        arrived = np.zeros(last + 1)
        np.add.at(arrived, self.complete_at, self.seconds_per_token * self.tokens)
        arrived = np.cumsum(arrived)
        for start in np.unique(np.linspace(0, last - 1, starts).astype(int)):
            tp = path.degrees[start]
            to = self.get_half_degree(tp)
            onward = half.follow(start, to)
            pause = self.move_seconds(start, tp)
            since = np.maximum(onward.seconds - self.setup, 0.0) / STRIDE
            # What is trained by a moment: all that came by some earlier one, and without a pause from there on.
            offers = arrived[start:] - since
            hidden = np.minimum(since, np.minimum.accumulate(offers) + since)
            for stop in np.unique(np.append(np.linspace(start, last, starts).astype(int), last)):
                at = stop - start
                rest = plain.get_to_go(stop, int(onward.degrees[at]))
                back = self.move_seconds(stop, int(onward.degrees[at])) if stop < last else 0.0
                total = path.seconds[start] + pause + onward.seconds[at] + back + rest
                total += self.training_seconds - hidden[at]
                if total < best:
                    best, schedule = total, (path, onward, plain, int(start), int(stop))
        return self._run_schedule(*schedule)

    def _run_schedule(self, before: _Path, onward: _Path | None, plain: _Best | None, start: int, stop: int) -> Step:
        after: _Path | None = None

        def choose_tp(point: int, now: float, tp: int, last: float, lent: bool) -> int:
            nonlocal after
            if onward is None or point < start:
                return int(before.held[point])
            if lent:
                return int(onward.held[point - start])
            if after is None:
                assert plain is not None
                after = plain.follow(point, tp)
                self._after = point
            return int(after.held[point - self._after])

        def choose_lending(point: int, now: float, tp: int, lent: bool, trainer: Trainer) -> Move:
            if onward is None or point < start:
                return Move.WAIT
            if not lent:
                return Move.LEND if point == start else Move.WAIT
            return Move.TAKE_BACK if point >= stop else Move.WAIT

        return self.run(choose_tp, choose_lending)


@dataclass(frozen=True)
class _Path:
    """From a point on: seconds up to each later point, the degree in force before and after a switch there."""

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

    def follow(self, point: int, tp: int, first: bool = False) -> _Path:
        """``first``: as :meth:`get_to_go`; from the start of the batch."""
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
