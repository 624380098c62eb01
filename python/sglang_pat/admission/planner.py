"""RollPacker's parallelism planner (section 4.2): the degree in which the next round of a kind starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Fingerprint

RISE = 1.05
"""More than so many times the retractions of the round before: not enough room for KV, tp is doubled."""

QUIET = 4
"""So many rounds without a retraction: more than enough, tp is halved."""


class StartDegree(msgspec.Struct):
    """Of one kind of round: its degree, retractions of its last round (None: there was none), rounds without any."""

    tp: int
    last: int | None = None
    quiet: int = 0


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
    """

    def __init__(self, degrees: Sequence[int], tp: int) -> None:
        if tp not in degrees:
            raise ValueError(f"tp {tp} is none of {list(degrees)}")
        self.degrees = sorted(degrees)
        self._start = tp
        self._courses: dict[str, StartDegree] = {}

    def tp(self, kind: str) -> int:
        """Degree for the next round of a kind."""
        return self._courses[kind].tp if kind in self._courses else self._start

    def observe(self, kind: str, retractions: int) -> int:
        """A round of this kind is over; returns the degree for the next one."""
        course = self._courses.setdefault(kind, StartDegree(self._start))
        place = self.degrees.index(course.tp)
        course.quiet = 0 if retractions else course.quiet + 1
        if course.last is not None and retractions > RISE * course.last:
            course.tp = self.degrees[min(place + 1, len(self.degrees) - 1)]
        elif course.quiet >= QUIET:
            course.tp, course.quiet = self.degrees[max(place - 1, 0)], 0
        course.last = retractions
        return course.tp
