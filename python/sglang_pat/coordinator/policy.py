"""When to switch, and to what: pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SETTLE_SECONDS = 1.0
"""A small batch that never was a large one is merged only after no request came in for this long,
so that the first requests of a large batch do not look like its tail."""

SPLIT_FACTOR = 2
"""Merged replicas are split again above this many times the load at which they merge, so that a load
that hovers about the threshold does not switch to and fro."""

RETRY_SECONDS = 5.0
"""After an aborted switch the policies wait this long."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a policy may look at.  Times are seconds of one monotonic clock.

    Attributes:
        tp: degree in force; ``degrees``: candidates in ascending order, base first.
        requests: requests in the engine (decoding, waiting, on their way to a replica).
        peak: most requests since the engine was last empty.
        last_arrival: when a request last came in.
        last_abort: when a switch was last aborted, or minus infinity.
    """

    now: float
    tp: int
    degrees: tuple[int, ...]
    requests: int
    peak: int
    last_arrival: float
    last_abort: float = float("-inf")


Policy = Callable[[Snapshot], int]
"""Returns the degree to be in; the one in force means stay."""


def stay(snapshot: Snapshot) -> int:
    """``manual``: switch on request only."""
    return snapshot.tp


def base_only(snapshot: Snapshot) -> int:
    """``off``: never leave the base layout."""
    return snapshot.degrees[0]


def threshold(switch_at: int) -> Policy:
    """Merge into the highest degree when ``switch_at`` requests or fewer are left; split above twice as many.

    An empty engine goes back to the base layout, where the next round starts and weights are updated.
    """

    def decide(snapshot: Snapshot) -> int:
        base, top = snapshot.degrees[0], snapshot.degrees[-1]
        if snapshot.now - snapshot.last_abort < RETRY_SECONDS:
            return snapshot.tp
        if snapshot.requests == 0 or snapshot.requests > switch_at * SPLIT_FACTOR:
            return base
        if snapshot.requests > switch_at:
            return snapshot.tp
        draining = snapshot.peak > switch_at
        settled = snapshot.now - snapshot.last_arrival >= SETTLE_SECONDS
        if snapshot.tp == top or draining or settled:
            return top
        return snapshot.tp

    return decide


def make_policy(name: str, switch_at: int) -> Policy:
    return {"threshold": threshold(switch_at), "manual": stay, "off": base_only}[name]
