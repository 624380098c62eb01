"""What a policy looks at (:class:`Snapshot`), and what it answers (:class:`Decision`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.predict.correction import StepFactor


def _make_empty() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests in the engine, one entry each; int64 ``[requests]``.

    Attributes:
        prompt: prompt tokens.
        output: tokens generated so far.
        limit: most tokens that may be generated (``max_new_tokens``).
        family: equal for responses to the same prompt.
        replica: replica that has it, counted among those that work in the layout in force (TP group number over
            stride).
    """

    prompt: np.ndarray = field(default_factory=_make_empty)
    output: np.ndarray = field(default_factory=_make_empty)
    limit: np.ndarray = field(default_factory=_make_empty)
    family: np.ndarray = field(default_factory=_make_empty)
    replica: np.ndarray = field(default_factory=_make_empty)

    def __len__(self) -> int:
        return len(self.prompt)


NO_LOAD = Load()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a policy may look at.  Times are seconds of one monotonic clock.

    Attributes:
        tp: degree in force; ``degrees``: candidates in ascending order, base first.
        num_ranks: N; a layout of degree t has N / t replicas.
        requests: requests in the engine (decoding, waiting, on their way to a replica, held back).
        peak: most requests in this round.
        last_arrival: when a request last came in (was passed on to a replica).
        last_switch: when a switch was last finished, or minus infinity.
        last_abort: when a switch was last aborted, or minus infinity.
        complete: the round has as many requests as were announced, or as the largest of the recent ones: no more are
            expected.
        in_round: a round that a client announced is under way: an empty engine waits for more of it, as for the next
            turns of agents.
        load: the requests, one by one; empty for policies that do not look at it.
        coming: while a round comes in, all requests it is expected to have, those that are here already included
            (``replica`` means nothing); empty if nothing is known of it or all have come.
        start: lowest degree of this round, since too many requests were retracted in lower ones in earlier rounds
            (:mod:`~sglang_pat.policies.start`).
        room: KV tokens that one replica has room for, by degree; empty if not known.
        switches: made in this round.
        factors: measured over predicted time of a step by degree, as far as this run has told; 1 where there is none.
        doubts: standard deviation of the logarithm of each factor over that of ``tp``, for the present load; 0 where
            there is none.
        chances: probability of the first, second, … draft of a request that it and those before it are right, of late;
            empty where nothing is drafted.
        draft_seconds: seconds of a trained model for one draft of each request, of late; as many in any layout, for
            each rank has the whole model.  0 where it drafts nothing.
    """

    now: float
    tp: int
    degrees: tuple[int, ...]
    num_ranks: int
    requests: int
    peak: int
    last_arrival: float
    last_switch: float = float("-inf")
    last_abort: float = float("-inf")
    complete: bool = False
    in_round: bool = False
    load: Load = NO_LOAD
    coming: Load = NO_LOAD
    start: int = 1
    room: Mapping[int, int] = field(default_factory=dict[int, int])
    switches: int = 0
    factors: Mapping[int, StepFactor] = field(default_factory=dict[int, StepFactor])
    doubts: Mapping[int, float] = field(default_factory=dict[int, float])
    chances: tuple[float, ...] = ()
    draft_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a policy wants.

    Attributes:
        tp: degree to be in; the one in force means stay.
        estimates: expected remaining seconds by degree, the cost of a switch to it included; empty if the
            policy does not estimate.
        recompute_below: requests with fewer KV tokens than this are cheaper recomputed than moved.
    """

    tp: int
    estimates: dict[int, float] = field(default_factory=dict)
    recompute_below: int = 0


Policy = Callable[[Snapshot, LengthHistory], Decision]
"""Says which degree to be in; the one in force means stay.  Reads both arguments and changes neither."""
