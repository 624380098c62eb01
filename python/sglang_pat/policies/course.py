"""The cheapest course from here: when to be in which layout while the expected batch drains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_pat.policies.outlook import Outlook
from sglang_pat.policies.prompts import computed
from sglang_pat.policies.snapshot import Snapshot
from sglang_pat.predict.correction import Corrected
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import Number, StepPredictor


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Expected seconds until the batch is done.

    Attributes:
        by_degree: when that layout is taken now (the cost of the switch to it included) and the best course is held
            from the next interval on.
        never: when the layout in force is kept to the end.
        now: cost of a switch to each other degree, seconds.
        saving: share of the present step time that each degree would save.
        recompute_below: of these switches.
    """

    by_degree: dict[int, float]
    never: float
    now: dict[int, float]
    saving: dict[int, float]
    recompute_below: dict[int, int]


class LayoutPlanner:
    """Backward induction over intervals of the outlook and layouts; switches in both directions, any number.

    Args:
        max_running: requests that one replica decodes at once, or None for no bound; the rest waits for them.
    """

    def __init__(self, predictor: StepPredictor, costs: SwitchCosts, max_running: int | None = None) -> None:
        self.predictor, self.costs, self.max_running = predictor, costs, max_running
        self._typical: dict[tuple[int, int], tuple[float, float]] = {}

    def plan(self, snapshot: Snapshot, outlook: Outlook) -> LayoutPlan:
        degrees, here = snapshot.degrees, snapshot.degrees.index(snapshot.tp)
        shares = {tp: _share_after(snapshot, tp) for tp in degrees}
        predictor = Corrected(self.predictor, snapshot.factors)
        running = np.stack([self._seconds(predictor, snapshot, outlook, tp, share) for tp, share in shares.items()])
        switching, now, below = self._switching(snapshot, outlook)
        totals = np.zeros((len(degrees), len(degrees)))  # [from, to]
        for step in range(len(outlook.width) - 1, -1, -1):
            totals = switching[step] + running[:, step] + totals.min(axis=1)
        prefill = np.array([self.prefill(snapshot, outlook, tp) for tp in degrees])
        return LayoutPlan(
            by_degree=dict(zip(degrees, (totals[here] + prefill).tolist(), strict=True)),
            never=float(running[here].sum() + prefill[here]),
            now=now,
            saving=dict(zip(degrees, (1 - running[:, 0] / running[here, 0]).tolist(), strict=True)),
            recompute_below=below,
        )

    def prefill(self, snapshot: Snapshot, outlook: Outlook, tp: int) -> float:
        """Seconds until the requests without a token, spread evenly, have their first one; 0 if the profile has no
        prefill times.

        Also 0 once responses have ended and not as many requests have come: they may be the next turns of agents, whose
        prompts are in the tree but for their ends.
        """
        predictor, load = Corrected(self.predictor, snapshot.factors), snapshot.load
        new = np.flatnonzero(load.output == 0)
        full = len(snapshot.coming) or snapshot.requests >= snapshot.peak
        if not full or not len(new) or not predictor.has_prefill(tp):
            return 0.0
        replicas = min(snapshot.num_ranks // tp, len(new))
        work = computed(load.prompt[new], load.family[new], outlook.response, replicas)
        return predictor.prefill_uniform(tp, *work, replicas)

    def _seconds(self, predictor: Corrected, snapshot: Snapshot, outlook: Outlook, tp: int, share: float) -> np.ndarray:
        """Expected seconds of each interval in a layout, ``[intervals]``.

        ``share``: of the other requests left, those on the replica of one that is left.
        """
        batch = 1 + (outlook.number - 1) * share
        replicas = snapshot.num_ranks // tp
        active = replicas * -np.expm1(outlook.number * np.log1p(-1 / replicas)) if replicas > 1 else 1.0
        factor: Number = 1.0
        if self.max_running is not None:
            factor = np.maximum(batch / self.max_running, 1.0)
            batch = batch / factor
        step = predictor.step_seconds(tp, batch, batch * outlook.context, active)
        return outlook.width * outlook.any_alive * factor * step

    def _switching(self, snapshot: Snapshot, outlook: Outlook) -> tuple[np.ndarray, dict[int, float], dict[int, int]]:
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
                fixed, per_token = self._typical_cost(source, target)
                state = per_token * tokens
                if source == snapshot.tp:
                    cost = self.costs.estimate(source, target, lengths)
                    fixed = cost.seconds - cost.state_seconds
                    state = np.maximum(cost.state_seconds + per_token * (tokens - held), 0.0)
                    now[target], below[target] = cost.seconds, cost.recompute_below
                result[:, i, j] = alive * (fixed + state)
        return result, now, below

    def _typical_cost(self, source: int, target: int) -> tuple[float, float]:
        """Seconds of a switch with a few long requests without their state, and seconds for each KV token."""
        if (source, target) not in self._typical:
            lengths = np.full(4, 8192)
            cost = self.costs.estimate(source, target, lengths)
            self._typical[source, target] = cost.seconds - cost.state_seconds, cost.state_seconds / lengths.sum()
        return self._typical[source, target]


def _share_after(snapshot: Snapshot, tp: int) -> float:
    """Of the other requests, those on the same replica as a request, averaged over requests, when ``tp`` is taken.

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
