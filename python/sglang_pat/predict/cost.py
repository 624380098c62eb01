"""What a switch costs (:meth:`SwitchCosts.estimate`), fitted to the switches of a profile (PAT section 4.3).

PAT estimates migration from the bytes on the critical path, for all unfinished requests at once:

    V = 2 · layers · hidden · bytes_per_element · Σ length_i / tp_source        (1)
    T_migrate = V / bandwidth_one_way_per_rank                                  (2)

and takes the smaller of this and the prefill of all of them at the target degree at their RMS length (3, 4).  Here
the seconds per KV token of a pair of layouts come from measured exchanges of that pair, so that packing, unpacking
and imbalance are in them, and the choice is made per request: the k shortest are recomputed, the rest moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile, ProfileError, SwitchSample, check_sufficient

DRAIN_STEPS = 0.5
"""Steps lost while replicas wait for each other.  Each finishes the step in flight, and these end at unrelated
moments: between nothing and one step of the slowest replica, half of it on average.  A single replica loses nothing."""


@dataclass(frozen=True, kw_only=True)
class SwitchCost:
    """Expected time without decode steps because of one switch, seconds.

    Attributes:
        seconds: finishing the steps in flight, agreeing, handing requests over, installing the layout, resharding if
            weights are not resident, and ``state_seconds``: moving or recomputing the KV of live requests.
        recompute_below: requests with fewer KV tokens are cheaper recomputed than moved; 0 if none is.
    """

    seconds: float
    state_seconds: float
    recompute_below: int


STAY = SwitchCost(seconds=0.0, state_seconds=0.0, recompute_below=0)
"""Cost of staying in the layout in force."""


@dataclass(frozen=True, kw_only=True)
class PairFit:
    """Fitted parameters of switches from one degree to another, seconds.

    ``kv_fixed`` is paid if any KV moves; ``kv_per_token``, with what handing a token over costs besides, is infinite if
    no migration was ever measured.
    """

    fixed: float
    per_request: float
    kv_fixed: float
    kv_per_token: float
    reshard: float


class SwitchCosts:
    """Cost of any switch between the degrees of a profile.

    Pairs that were not measured get, in this order:

    * control: one line through the samples of all pairs.
    * KV: one line through all exchanges over ``tokens · (1 - low/high)``, the share of a token's KV that changes rank
      when shards nest (``low``, ``high``: the smaller and the larger degree).
    * resharding: that of the way back, else the longest measured.

    Raises:
        ProfileError: no switch was measured, or KV can be neither moved nor recomputed.
    """

    def __init__(self, profile: Profile, predictor: Predictor) -> None:
        if not profile.switches:
            raise ProfileError("the profile has no switches; make one with python -m profiler.sweep")
        self.predictor = predictor
        self._num_ranks = profile.fingerprint.num_ranks
        samples: dict[tuple[int, int], list[SwitchSample]] = {}
        for sample in profile.switches:
            samples.setdefault((sample.from_tp, sample.to_tp), []).append(sample)
        control = fit_control(profile.switches, None)
        kv = fit_kv(profile.switches, nested=True)
        resharding = {pair: fit_reshard(of_pair) for pair, of_pair in samples.items()}
        self._fits: dict[tuple[int, int], PairFit] = {}
        degrees = {*profile.fingerprint.degrees, *(tp for pair in samples for tp in pair)}
        for pair in ((a, b) for a in degrees for b in degrees if a != b):
            own = samples.get(pair, [])
            fixed, per_request, per_token = fit_control(own, control) if own else control
            migrated = fit_kv(own)
            if migrated is None and kv is not None:
                migrated = kv[0], kv[1] * (1 - min(pair) / max(pair))
            kv_fixed, kv_per_token = migrated or (0.0, np.inf)
            kv_per_token += per_token
            reshard = resharding.get(pair, resharding.get((pair[1], pair[0]), max(resharding.values())))
            self._fits[pair] = PairFit(
                fixed=fixed, per_request=per_request, kv_fixed=kv_fixed, kv_per_token=kv_per_token, reshard=reshard
            )
            if kv_per_token == np.inf and not predictor.has_prefill(pair[1]):
                raise ProfileError(f"the profile can neither move nor recompute KV to tp={pair[1]}; sweep again")

    def fit(self, from_tp: int, to_tp: int) -> PairFit:
        """The parameters of one pair, measured or by the rule for those that were not."""
        try:
            return self._fits[from_tp, to_tp]
        except KeyError:
            raise ProfileError(f"the profile does not know a switch from tp={from_tp} to tp={to_tp}") from None

    def estimate(self, from_tp: int, to_tp: int, lengths: np.ndarray | tuple[()] = ()) -> SwitchCost:
        """Cost of a switch.

        Args:
            lengths: KV tokens of the live requests of the engine, ``[requests]``; empty for a return to base after
                the batch.
        """
        if from_tp == to_tp:
            return STAY
        fit = self.fit(from_tp, to_tp)
        lengths = np.sort(np.asarray(lengths, dtype=float))
        control = fit.fixed + fit.per_request * lengths.size + self._estimate_drain_seconds(from_tp, lengths)
        state, below = self._estimate_state_seconds(fit, to_tp, lengths) if lengths.size else (0.0, 0)
        return SwitchCost(seconds=control + state + fit.reshard, state_seconds=state, recompute_below=below)

    def estimate_lending(self, tp: int, lengths: np.ndarray | tuple[()] = ()) -> SwitchCost:
        """Cost of lending every second replica of degree ``tp``, or of taking it back: half of the requests move whole.

        Not measured in a profile.  Control is that of a switch to the next degree.  KV: of each pair of ranks one has
        it and the other gets it, twice a rank's part in an exchange in which all KV changes rank and all send.

        Args:
            lengths: KV tokens of all live requests of the engine, ``[requests]``.
        """
        others = [pair[1] for pair in self._fits if pair[0] == tp]
        if not others:
            raise ProfileError(f"the profile has no switch from tp={tp}: a lending cannot be estimated from it")
        other = min(others, key=lambda degree: (degree < tp, abs(degree - tp)))
        fit = self.fit(tp, other)
        lengths = np.sort(np.asarray(lengths, dtype=float))
        control = fit.fixed + fit.per_request * lengths.size + self._estimate_drain_seconds(tp, lengths)
        moved = lengths[1::2]
        per_token = 2 * fit.kv_per_token / (1 - min(tp, other) / max(tp, other))
        target = replace(fit, kv_per_token=per_token)
        state, below = self._estimate_state_seconds(target, tp, moved) if moved.size else (0.0, 0)
        return SwitchCost(seconds=control + state, state_seconds=state, recompute_below=below)

    def _estimate_drain_seconds(self, tp: int, lengths: np.ndarray) -> float:
        replicas = min(self._num_ranks // tp, lengths.size)
        if replicas < 2:
            return 0.0
        batch = -(-lengths.size // replicas)
        return DRAIN_STEPS * self.predictor.step_seconds(tp, batch, batch * float(lengths.mean()), replicas)

    def _estimate_state_seconds(self, fit: PairFit, to_tp: int, lengths: np.ndarray) -> tuple[float, int]:
        """Seconds of the best split, and the length below which requests are recomputed.

        ``lengths`` ascending.  Recomputed requests are spread evenly over the target's replicas.  Requests of equal
        length stay together, so that one number tells the two kinds apart.
        """
        count = lengths.size
        before = np.concatenate([[0.0], np.cumsum(lengths)])
        if np.isfinite(fit.kv_per_token):
            seconds = fit.kv_fixed + fit.kv_per_token * (before[-1] - before)
            seconds[-1] = 0.0
        else:
            seconds = np.full(count + 1, np.inf)
            seconds[-1] = 0.0
        if self.predictor.has_prefill(to_tp):
            k = np.arange(1, count + 1)
            replicas = np.minimum(self._num_ranks // to_tp, k)
            rms = np.sqrt(np.cumsum(lengths * lengths) / k)
            seconds[1:] += self.predictor.prefill_uniform(to_tp, -(-k // replicas), rms, replicas)
            seconds[1:-1][lengths[1:] == lengths[:-1]] = np.inf
        else:
            seconds[1:] = np.inf
        best = int(np.argmin(seconds))
        if best == 0:
            return float(seconds[0]), 0
        return float(seconds[best]), int(lengths[best] if best < count else lengths[-1] + 1)


def build_predictors(profile: Profile) -> tuple[Predictor, SwitchCosts]:
    """The step predictor and the switch costs of ``profile``.

    Raises:
        ProfileError: too little was measured to predict from.
    """
    try:
        check_sufficient(profile)
    except ValueError as error:
        raise ProfileError(f"the profile cannot predict: {error}; sweep again") from None
    predictor = Predictor(profile)
    return predictor, SwitchCosts(profile, predictor)


_ROUNDS = 30
LEAST_SECONDS = 1e-9
"""Nothing that is fitted is known better than this."""


def fit_robust_nnls(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative coefficients of ``features [samples, terms]``, little moved by a few samples far off.

    Non-negative least squares of the relative error, for a switch that takes milliseconds is to be known as well as
    one that takes a second, repeated with samples beyond the median residual weighted down by how far they are (Huber's
    weights).
    """
    each = np.maximum(np.abs(seconds), max(1e-3 * float(np.abs(seconds).max()), LEAST_SECONDS))
    features, seconds = features / each[:, None], seconds / each
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    weights = np.ones(len(seconds))
    coefficients = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients, _ = nnls(features / scale * root[:, None], seconds * root)
        residuals = np.abs(seconds - features / scale @ coefficients)
        usual = max(float(np.median(residuals)), 1e-9 * float(np.abs(seconds).max()), 1e-300)
        before, weights = weights, np.minimum(1.0, usual / np.maximum(residuals, usual))
        if np.array_equal(weights, before):
            break  # the next round would find the same
    return coefficients / scale


def fit_control(
    samples: Sequence[SwitchSample], pooled: tuple[float, float, float] | None
) -> tuple[float, float, float]:
    """Coefficients (fixed, per request, per KV token that comes along) of the pause without KV, weights and the wait
    for steps.  What does not differ between the samples has ``pooled``'s slope."""
    counts = np.array([[sample.requests, _count_migrated_tokens(sample)] for sample in samples], dtype=float)
    seconds = np.array([max(sample.pause_seconds - _compute_seconds_beside_moving(sample), 0.0) for sample in samples])
    slopes = np.array(pooled[1:] if pooled else (0.0, 0.0))
    free = np.array([len(set(column)) > 1 for column in counts.T])
    unexplained = np.maximum(seconds - counts[:, ~free] @ slopes[~free], 0.0)
    fixed, *fitted = fit_robust_nnls(np.column_stack([np.ones(len(samples)), counts[:, free]]), unexplained)
    slopes[free] = fitted
    return float(fixed), float(slopes[0]), float(slopes[1])


def _count_migrated_tokens(sample: SwitchSample) -> int:
    """Number of KV tokens that moved."""
    return sample.tokens if sample.mode == "migrate" else 0


def _compute_seconds_beside_moving(sample: SwitchSample) -> float:
    return sum(sample.phases.get(phase, 0.0) for phase in ("drain", "kv", "weights"))


def fit_kv(samples: Sequence[SwitchSample], nested: bool = False) -> tuple[float, float] | None:
    """Coefficients (fixed, per token) of the KV exchange; None without one.  ``nested``: per token that changes
    rank."""
    moved = [sample for sample in samples if _count_migrated_tokens(sample) > 0]
    if not moved:
        return None
    tokens = np.array([sample.tokens * (_compute_moving_share(sample) if nested else 1.0) for sample in moved])
    seconds = np.array([sample.phases.get("kv", 0.0) for sample in moved])
    if len(set(tokens)) > 1:
        fixed, per_token = fit_robust_nnls(np.stack([np.ones_like(tokens), tokens], axis=1), seconds)
        if per_token > 0:
            return float(fixed), float(per_token)
    # Too few or too noisy to tell the two apart: all of it counts as per token, which overstates long contexts.
    return 0.0, float(np.median(seconds / tokens))


def _compute_moving_share(sample: SwitchSample) -> float:
    low, high = sorted((sample.from_tp, sample.to_tp))
    return 1 - low / high


def fit_reshard(samples: Sequence[SwitchSample]) -> float:
    """Seconds in which weights move during the pause; 0 where they are resident."""
    return float(np.median([sample.phases.get("weights", 0.0) for sample in samples]))
