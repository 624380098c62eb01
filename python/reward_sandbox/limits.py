"""How long a test case may take: learnt from the right answers to it (RollPacker, section 4.3).

A pure state machine: it runs nothing and reads no clock.  One object is the owner for all workers; its messages are
lists, so that one call serves a whole program.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

Z = 1.96
"""Standard normal quantile of a two-sided interval of 95%."""
ENOUGH = 0.9
"""Share of its limit that a cut second run must have used.  One that used less got no core, and says nothing."""


@dataclass(frozen=True, kw_only=True)
class LimitRules:
    """The paper's rule, min(max(Tmin, factor x Tanchor), Tmax), and how many cuts are looked at again."""

    minimum: float = 2.0
    """Tmin, seconds: no limit is shorter."""
    maximum: float = 30.0
    """Tmax, seconds: no limit is longer.  It is the limit of a case without a right answer so far."""
    factor: float = 1.5
    """Limit as a multiple of the anchor, which is the longest time of a right answer."""
    rerun_share: float = 0.02
    """Share of the cut runs that are run again to ``maximum``; with 0 nothing is estimated."""
    seed: int = 0
    """Seed of the draw that chooses those runs."""

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.maximum < math.inf:
            limits = f"limits of {self.minimum} to {self.maximum} seconds"
            raise ValueError(f"{limits}, must be above 0, and the minimum not above the maximum")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"limit factor is {self.factor}, must be 1 or more")
        if not 0 <= self.rerun_share <= 1:
            raise ValueError(f"rerun_share is {self.rerun_share}, must be from 0 to 1 (0.02: one cut run of fifty)")


class CaseRun(NamedTuple):
    """One run of a program on one test case."""

    key: str
    """Key of the test case."""
    outcome: str
    """``right``, ``cut``, or why it was not right."""
    seconds: float
    """Seconds that the program took, by the clock of the limits (:mod:`reward_sandbox.runs`)."""
    limit: float
    """Seconds that it was given."""
    rerun: bool = False
    """Whether this is the second run, to the maximum, of a program that was cut."""


class Interval(NamedTuple):
    """An estimate, and the ends of its interval of 95%; ``estimate`` is NaN where nothing was run again."""

    estimate: float
    low: float
    high: float


class TimeLimits:
    """Limits by test case, learnt while the job runs.

    Life of a case: at first its limit is ``maximum``.  Each right answer raises its anchor.  From then on the limit is
    the paper's rule.  Where a limit below ``maximum`` cut a run, :meth:`record` says for a share of them that the run
    has to be done again; the result comes back as a :class:`CaseRun` with ``rerun``.  If it is right, the cut was
    wrong, and the anchor grows.
    """

    def __init__(self, rules: LimitRules | None = None) -> None:
        self.rules = rules or LimitRules()
        self._anchors: dict[str, float] = {}
        self._draws = 0
        self._reruns = 0
        self._right_reruns = 0
        self._step: Counter[str] = Counter()

    def get_limits(self, keys: Sequence[str]) -> list[float]:
        """Seconds for each test case."""
        rules = self.rules
        # Without an anchor no guess: it would cut right answers that then never raise the anchor.
        return [min(max(rules.minimum, rules.factor * self._anchors.get(key, math.inf)), rules.maximum) for key in keys]

    def record(self, runs: Sequence[CaseRun]) -> list[bool]:
        """Learn from runs; whether each has to be run again, to ``maximum``, when a worker has nothing else to do."""
        return [self._record(run) for run in runs]

    def _record(self, run: CaseRun) -> bool:
        right = run.outcome == "right"
        if right:
            self._anchors[run.key] = max(run.seconds, self._anchors.get(run.key, 0.0))
        if run.rerun:
            if run.outcome == "lost" or (run.outcome == "cut" and run.seconds < ENOUGH * run.limit):
                return False  # nobody knows what it would have been
            self._step["rerun"] += 1
            self._reruns += 1
            self._right_reruns += right
            return False
        self._step.update(("cases", run.outcome))
        if run.outcome != "cut":
            return False
        if run.limit >= self.rules.maximum:
            self._step["cut_at_maximum"] += 1
            return False
        return self._draw(run.key)

    def _draw(self, key: str) -> bool:
        """Whether to run a cut run again.  A hash decides, not a generator: the state to save is one number."""
        self._draws += 1
        text = f"{self.rules.seed} {self._draws} {key}".encode()
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64
        return drawn < self.rules.rerun_share

    def estimate_wrong_cuts(self, cuts: int) -> Interval:
        """Estimated number of right runs among ``cuts`` runs that were cut below ``maximum``.

        The share is that of all reruns of the job so far; the interval is Wilson's, of 95%.  It does not collapse
        where no rerun was right.
        """
        if not self._reruns:
            return Interval(math.nan, 0.0, float(cuts))
        n, share = self._reruns, self._right_reruns / self._reruns
        middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
        low = middle - half if self._right_reruns else 0.0
        high = middle + half if self._right_reruns < n else 1.0
        return Interval(cuts * share, cuts * low, cuts * high)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the step that ends now, for a tracker; the next step begins.

        There are counts by outcome, ``cases`` (all), ``cut_at_maximum`` and ``rerun`` (second runs that came back).
        ``wrong_cuts``, ``wrong_cuts_low`` and ``wrong_cuts_high`` say how many of the runs cut below the maximum in
        this step would have been right (:meth:`estimate_wrong_cuts`); without any rerun so far only the bounds.
        """
        step, self._step = self._step, Counter()
        metrics: dict[str, float] = {name: float(count) for name, count in step.items()}
        estimate = self.estimate_wrong_cuts(step["cut"] - step["cut_at_maximum"])
        if not math.isnan(estimate.estimate):
            metrics["wrong_cuts"] = estimate.estimate
        return metrics | {"wrong_cuts_low": estimate.low, "wrong_cuts_high": estimate.high}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, in plain types, without the counts of a step that has not ended."""
        return {
            "rules": asdict(self.rules),
            "anchors": dict(self._anchors),
            "draws": self._draws,
            "reruns": self._reruns,
            "right_reruns": self._right_reruns,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; the rules are those of this object.

        Raises:
            ValueError: it is none of :meth:`state_dict`; one line, and nothing is changed.
        """
        try:
            anchors = {str(key): float(seconds) for key, seconds in state["anchors"].items()}
            draws, reruns, right = (int(state[name]) for name in ("draws", "reruns", "right_reruns"))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"saved time limits of rewards cannot be read ({type(error).__name__}: {error})") from None
        if not all(0 <= seconds < math.inf for seconds in anchors.values()) or not 0 <= right <= reruns:
            raise ValueError("saved time limits of rewards cannot be read: an anchor or a count is out of range")
        self._anchors, self._draws, self._reruns, self._right_reruns = anchors, draws, reruns, right

    def merge(self, state: Mapping[str, Any]) -> None:
        """Learn what another object knows; counts are taken from the object that has seen more.

        Merging the same state twice changes nothing the second time.

        Raises:
            ValueError: as :meth:`load_state_dict`; nothing is changed.
        """
        other = TimeLimits(self.rules)
        other.load_state_dict(state)
        for key, seconds in other._anchors.items():
            self._anchors[key] = max(seconds, self._anchors.get(key, 0.0))
        self._draws = max(self._draws, other._draws)
        seen = (self._reruns, self._right_reruns), (other._reruns, other._right_reruns)
        self._reruns, self._right_reruns = max(seen)
