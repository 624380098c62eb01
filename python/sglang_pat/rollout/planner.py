"""RollPacker's parallelism planner (section 4.2): the degree in which the next round of a kind starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Fingerprint

TOO_MANY = 1e-4
"""Retractions per token generated, above which there is not enough room for KV: tp is doubled.

A retraction costs a prefill of some thousand tokens.  One in 10,000 tokens of a full batch takes some tenths of the
time.
"""

FEW = TOO_MANY / 4
"""Below this there is room enough.  Between the two the degree stays."""

LEAST = 4
"""Fewer retractions than these in a round say nothing."""

QUIET = 4
"""So many rounds in a row with few retractions: tp is halved."""

LONGEST_QUIET = 64
"""Each time that a lower degree turns out to be too low, twice as many quiet rounds are asked for, up to so many."""


class StartDegree(msgspec.Struct):
    """Of one kind of round.

    Attributes:
        tp: degree in which the next one starts.
        quiet: rounds with few retractions since the degree was changed, or since there were more.
        patience: quiet rounds after which a lower degree is tried.
        lowered: whether that was the last change.
    """

    tp: int
    quiet: int = 0
    patience: int = QUIET
    lowered: bool = False


def profiled_degree(predictor: Predictor, engine: Fingerprint, samples: int, prompt: float, limit: int) -> int:
    """The degree that decodes a batch fastest, by the profile: what the planner starts with.

    Args:
        engine: whose KV and running requests there are.
        samples: of a batch, without speculation; spread evenly over the replicas.
        prompt, limit: tokens of each prompt, and of a response at most.  Each sample is taken to be half way, and to
            need room for all of it; those for which a replica has none wait for the others.
    """

    def seconds(tp: int) -> float:
        """Of a token for each sample."""
        each = math.ceil(samples * tp / engine.num_ranks)
        room = int(engine.kv_tokens * tp / engine.base_tp / (prompt + limit))
        batch = max(1, min(each, room, engine.max_running))
        return each / batch * predictor.step_seconds(tp, batch, batch * (prompt + limit / 2))

    return min(sorted(engine.degrees), key=seconds)


class Planner:
    """Starts at ``tp``; ``degrees``: those that there are.

    Short and long rounds have courses of their own: what they need differs, that is why there are two.

    Args:
        courses: by kind of round, of an earlier planner; those whose degree there is no more are left out.
    """

    def __init__(self, degrees: Sequence[int], tp: int, courses: Mapping[str, StartDegree] | None = None) -> None:
        if tp not in degrees:
            raise ValueError(f"tp {tp} is none of {list(degrees)}")
        self.degrees = sorted(degrees)
        self._start = tp
        self.courses = {kind: course for kind, course in (courses or {}).items() if course.tp in degrees}

    def tp(self, kind: str) -> int:
        """Degree for the next round of a kind."""
        return self.courses[kind].tp if kind in self.courses else self._start

    def observe(self, kind: str, retractions: int, tokens: int) -> int:
        """A round of this kind is over; returns the degree for the next one.

        Args:
            retractions, tokens: requests put back in it for want of KV; tokens generated in it.
        """
        course = self.courses.setdefault(kind, StartDegree(self._start))
        rate = retractions / max(tokens, 1) if retractions >= LEAST else 0.0
        if rate > TOO_MANY:
            if course.lowered:
                course.patience = min(2 * course.patience, LONGEST_QUIET)
            self._change(course, 1)
        elif rate >= FEW:
            course.quiet = 0
        else:
            course.quiet += 1
            if course.quiet >= course.patience:
                self._change(course, -1)
        return course.tp

    def _change(self, course: StartDegree, by: int) -> None:
        """One degree up or down, if there is one."""
        place = min(max(self.degrees.index(course.tp) + by, 0), len(self.degrees) - 1)
        course.lowered = self.degrees[place] < course.tp
        course.tp, course.quiet = self.degrees[place], 0
