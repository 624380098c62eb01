"""The cheapest course from here: what is expected of the running batch (:func:`look_ahead`), and when to be in which
layout meanwhile (:meth:`LayoutPlanner.plan`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.prompts import count_prompts_to_compute, count_shared_tokens
from sglang_pat.policies.rules import SETTLE_SECONDS, predict_as_seen
from sglang_pat.policies.snapshot import Load, Snapshot
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import StepPredictor

STEPS = 48
"""Intervals of the grid over future tokens."""

FIRST_STEP = 16
"""Tokens of the grid's first interval; the others grow geometrically up to the most that any request may still
generate."""

CLASSES = 96
"""Requests alike in length and limit are counted together, into about this many classes at most."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The batch in each interval of the grid, float64 ``[intervals]``, taken at the interval's middle.

    Attributes:
        width: token steps in the interval.
        any_alive: probability that a request is left.
        number: requests left, given that one is.
        context: KV tokens of one that is left, on average.
        response: tokens that a response has, as requests are routed by it; one number.
    """

    width: np.ndarray
    any_alive: np.ndarray
    number: np.ndarray
    context: np.ndarray
    response: float = np.inf


def make_grid(longest: int) -> np.ndarray:
    """Interval ends ``[intervals + 1]``, from 0 to ``longest`` tokens ahead; increasing integers."""
    if longest <= FIRST_STEP:
        return np.array([0.0, longest])
    ends = FIRST_STEP * (longest / FIRST_STEP) ** (np.arange(STEPS) / (STEPS - 1))
    return np.concatenate([[0.0], np.unique(np.round(ends))])


def look_ahead(load: Load, history: LengthHistory) -> Outlook | None:
    """Survival of every running request given its present length; None if all are at their limit."""
    left = load.limit - load.output
    longest = int(left.max())
    if longest <= 0:
        return None
    curve = history.make_curve(int(load.limit.max()), load.output)
    # One at its limit ends with the next step; averaged with others it would end them too.
    on = left > 0
    members, output, left, prompt = _group_requests(load.output[on], left[on], load.prompt[on])
    ends = make_grid(longest)
    ahead = (ends[:-1] + ends[1:]) / 2
    alive = curve.compute_alive(output, left, ahead)  # [classes, intervals]
    number = members @ alive
    none_alive = np.exp(members @ np.log1p(-np.minimum(alive, 1 - 1e-15)))
    any_alive = np.maximum(1 - none_alive, 1e-12)
    tokens = (members * (prompt + output)) @ alive + number * ahead
    number = np.maximum(number, 1e-12)
    return Outlook(
        width=np.diff(ends),
        any_alive=any_alive,
        number=np.maximum(number / any_alive, 1.0),
        context=tokens / number,
        response=history.estimate_mean(int(load.limit.max())),
    )


def _group_requests(output: np.ndarray, left: np.ndarray, prompt: np.ndarray) -> tuple[np.ndarray, ...]:
    """Requests counted together: members of each class, and the mean of each quantity in it, float64 ``[classes]``."""
    keys = [np.log(output + 16.0), np.log(np.maximum(left, 1.0))]
    resolution = 32.0
    while True:
        codes = [np.floor((key - key.min()) * resolution).astype(np.int64) for key in keys]
        _, index, members = np.unique(codes[0] * 4096 + codes[1], return_inverse=True, return_counts=True)
        if len(members) <= CLASSES:
            means = (np.bincount(index, quantity) / members for quantity in (output, left, prompt))
            return members.astype(float), *means
        resolution /= 2


@dataclass(frozen=True, kw_only=True)
class Course:
    """The layouts of least expected time from any interval and layout on.

    Attributes:
        degrees: in the order of the arrays.
        running: expected seconds of each interval in each layout, ``[degrees, intervals]``.
        switching: expected seconds of a switch at the start of each interval, ``[intervals, from, to]``.
        choice: number of the degree that is held in an interval, by the one before, ``[intervals, from]``.
        to_go: expected seconds from the start of an interval to the end of the batch, by the degree in force before it,
            ``[intervals + 1, from]``; 0 at the end.
    """

    degrees: tuple[int, ...]
    running: np.ndarray
    switching: np.ndarray
    choice: np.ndarray
    to_go: np.ndarray

    def follow(self, start: int, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Expected seconds and the degrees in force on the best course from the start of interval ``start``, in ``tp``:
        ``[intervals - start + 1]`` each.  Seconds count up to the start of each later interval and to the end; both
        begin with now."""
        here = self.degrees.index(tp)
        seconds, held = [0.0], [tp]
        for step in range(start, len(self.choice)):
            entered = int(self.choice[step, here])
            seconds.append(seconds[-1] + float(self.switching[step, here, entered] + self.running[entered, step]))
            here = entered
            held.append(self.degrees[here])
        return np.array(seconds), np.array(held)


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Expected seconds until the batch is done.

    Attributes:
        by_degree: when that layout is taken now (the cost of the switch to it included) and the best course is held
            from the next interval on.  After a switch tp is not raised again for :data:`SETTLE_SECONDS`.
        kept: when that layout is taken now, without the cost of the switch, and kept to the end.
        crowded: degrees in which requests would then wait for others.
        now: cost of a switch to each other degree, seconds.
        saving: share of the present step time that each degree would save.
        recompute_below: tokens below which these switches recompute a request.
        course: what ``by_degree`` follows from; prefill is not in it.
    """

    by_degree: dict[int, float]
    kept: dict[int, float]
    crowded: frozenset[int]
    now: dict[int, float]
    saving: dict[int, float]
    recompute_below: dict[int, int]
    course: Course


class LayoutPlanner:
    """Backward induction over intervals of the outlook and layouts; switches in both directions, any number.

    Args:
        max_running: requests that one replica decodes at once, or None for no bound.  The rest waits for them, as do
            those for which a replica has no room (``Snapshot.room``).
    """

    def __init__(self, predictor: StepPredictor, costs: SwitchCosts, max_running: int | None = None) -> None:
        self.predictor, self.costs, self.max_running = predictor, costs, max_running
        self._typical: dict[tuple[int, int], tuple[float, float]] = {}

    def plan(self, snapshot: Snapshot, outlook: Outlook) -> LayoutPlan:
        degrees, here = snapshot.degrees, snapshot.degrees.index(snapshot.tp)
        predictor = predict_as_seen(self.predictor, snapshot, self.max_running)
        # Of the other requests left, those on the replica of one that is left.
        batches = {tp: 1 + (outlook.number - 1) * _compute_share_after(snapshot, tp) for tp in degrees}
        most = self._count_running(snapshot, outlook)
        running = np.stack(
            [self._estimate_seconds(predictor, snapshot, outlook, tp, batches[tp], most[tp]) for tp in degrees]
        )
        switching, now, below = self._estimate_switches(snapshot, outlook)
        course = _find_course(degrees, running, switching)
        # Whoever switches now may not raise tp again so soon, by the clock of the layout that is entered.
        passed = (np.cumsum(running, axis=1) - running)[:, :, None, None]  # [entered, intervals, 1, 1]
        moves = np.where(np.less.outer(degrees, degrees) & (passed < SETTLE_SECONDS), np.inf, switching)
        rest = np.zeros((len(degrees), len(degrees)))  # seconds from the next interval on, [entered, degree before it]
        for step in range(len(outlook.width) - 1, 0, -1):
            rest = (moves[:, step] + running[:, step] + rest[:, None]).min(axis=2)
        after = np.where(np.arange(len(degrees)) == here, course.to_go[1], rest.diagonal())
        totals = switching[0, here] + running[:, 0] + after
        prefill = np.array([self.estimate_prefill(snapshot, outlook, tp) for tp in degrees])
        return LayoutPlan(
            by_degree=dict(zip(degrees, (totals + prefill).tolist(), strict=True)),
            kept=dict(zip(degrees, (running.sum(axis=1) + prefill).tolist(), strict=True)),
            crowded=frozenset(tp for tp in degrees if np.any(batches[tp] > most[tp])),
            now=now,
            saving=dict(zip(degrees, (1 - running[:, 0] / running[here, 0]).tolist(), strict=True)),
            recompute_below=below,
            course=course,
        )

    def estimate_prefill(self, snapshot: Snapshot, outlook: Outlook, tp: int) -> float:
        """Seconds until the requests without a token, spread evenly, have their first one; 0 if the profile has no
        prefill times.

        Also 0 once responses have ended and not as many requests have come: they may be the next turns of agents, whose
        prompts are in the tree but for their ends.
        """
        predictor, load = predict_as_seen(self.predictor, snapshot, self.max_running), snapshot.load
        new = np.flatnonzero(load.output == 0)
        full = len(snapshot.coming) or snapshot.requests >= snapshot.peak
        if not full or not len(new) or not predictor.has_prefill(tp):
            return 0.0
        replicas = min(snapshot.num_ranks // tp, len(new))
        work = count_prompts_to_compute(load.prompt[new], load.family[new], outlook.response, replicas)
        return predictor.prefill_uniform(tp, *work, replicas)

    def _count_running(self, snapshot: Snapshot, outlook: Outlook) -> dict[int, np.ndarray]:
        """Requests that a replica of each degree can run at once, ``[intervals]``; at least 1."""
        own = np.maximum(outlook.context - count_shared_tokens(snapshot.load.prompt, snapshot.load.family), 1.0)
        slots = self.max_running or np.inf
        return {tp: np.maximum(np.minimum(snapshot.room.get(tp, np.inf) / own, slots), 1.0) for tp in snapshot.degrees}

    def _estimate_seconds(
        self,
        predictor: StepPredictor,
        snapshot: Snapshot,
        outlook: Outlook,
        tp: int,
        batch: np.ndarray,
        most: np.ndarray,
    ) -> np.ndarray:
        """Expected seconds of each interval in a layout, ``[intervals]``.

        Args:
            batch: requests of a replica, those that wait included, ``[intervals]``.
            most: requests that a replica can run at once; the others wait for their turn.
        """
        replicas = snapshot.num_ranks // tp
        active = replicas * -np.expm1(outlook.number * np.log1p(-1 / replicas)) if replicas > 1 else 1.0
        turns = np.maximum(batch / most, 1.0)
        batch = batch / turns
        step = predictor.step_seconds(tp, batch, batch * outlook.context, active)
        return outlook.width * outlook.any_alive * turns * step

    def _estimate_switches(
        self, snapshot: Snapshot, outlook: Outlook
    ) -> tuple[np.ndarray, dict[int, float], dict[int, int]]:
        """Expected seconds of a switch at the start of each interval, ``[intervals, from, to]``; of one now; and its
        ``recompute_below``."""
        degrees, lengths = snapshot.degrees, snapshot.load.prompt + snapshot.load.output
        # At the start of an interval things are as in the middle of the one before.
        alive = np.concatenate([[1.0], outlook.any_alive[:-1]])
        held = float(lengths.sum())
        tokens = np.concatenate([[held], (outlook.number * outlook.context)[:-1]])
        result = np.zeros((len(alive), len(degrees), len(degrees)))
        now: dict[int, float] = {}
        below: dict[int, int] = {}
        for i, source in enumerate(degrees):
            for j, target in enumerate(degrees):
                if source == target:
                    continue
                fixed, per_token = self._estimate_typical_cost(source, target)
                state = per_token * tokens
                if source == snapshot.tp:
                    cost = self.costs.estimate(source, target, lengths)
                    fixed = cost.seconds - cost.state_seconds
                    state = np.maximum(cost.state_seconds + per_token * (tokens - held), 0.0)
                    now[target], below[target] = cost.seconds, cost.recompute_below
                result[:, i, j] = alive * (fixed + state)
        return result, now, below

    def _estimate_typical_cost(self, source: int, target: int) -> tuple[float, float]:
        """Seconds of a switch with a few long requests without their state, and seconds for each KV token."""
        if (source, target) not in self._typical:
            lengths = np.full(4, 8192)
            cost = self.costs.estimate(source, target, lengths)
            self._typical[source, target] = cost.seconds - cost.state_seconds, cost.state_seconds / lengths.sum()
        return self._typical[source, target]


def _find_course(degrees: tuple[int, ...], running: np.ndarray, switching: np.ndarray) -> Course:
    """Backward induction; ``running`` and ``switching`` as in :class:`Course`."""
    intervals = running.shape[1]
    to_go = np.zeros((intervals + 1, len(degrees)))
    choice = np.zeros((intervals, len(degrees)), dtype=np.int64)
    for step in range(intervals - 1, -1, -1):
        totals = switching[step] + running[:, step] + to_go[step + 1]  # [from, to]
        choice[step], to_go[step] = totals.argmin(axis=1), totals.min(axis=1)
    return Course(degrees=degrees, running=running, switching=switching, choice=choice, to_go=to_go)


def _compute_share_after(snapshot: Snapshot, tp: int) -> float:
    """Mean over requests of the share of the other requests that are on the same replica in ``tp``.

    Replicas merge whole when tp is raised; when it is lowered the requests of each are spread over its parts.
    """
    replicas = snapshot.num_ranks // tp
    if tp >= snapshot.tp:
        counts = np.bincount(snapshot.load.replica % replicas, minlength=replicas)
    else:
        parts = snapshot.tp // tp
        whole = np.bincount(snapshot.load.replica, minlength=snapshot.num_ranks // snapshot.tp)
        counts = np.concatenate([(whole + part) // parts for part in range(parts)])
    total = counts.sum()
    return float((counts * (counts - 1)).sum() / (total * (total - 1))) if total > 1 else 0.0
