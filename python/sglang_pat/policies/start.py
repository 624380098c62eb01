"""The degree in which a round starts (:class:`StartDegrees`): the parallelism planner of RollPacker (section 4.2), as a
part of the policy.

RollPacker begins with the degree that is best offline, doubles tp for the next round when requests had to be preempted,
and halves it after some rounds without.  The first part is prediction: ``survival`` starts where all of the round is
done first, waits for KV room included (:mod:`~sglang_pat.policies.course`).  What it misses shows in the retractions of
earlier rounds: responses were longer than expected, or one replica had no room while others had.  A higher degree has
fewer and larger pools.  The rule for that is here, for all policies that decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.rules import RETRY_SECONDS, SETTLE_SECONDS
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot

TOO_MANY = 1e-4
"""Retractions per token generated, above which there is not enough room for KV: tp is doubled.

A retraction costs a prefill of some thousand tokens.  One in 10,000 tokens of a full batch takes some tenths of the
time.  (RollPacker compares with the round before, 5% more.  A constant number, however large, then never doubles tp,
and noise does.)
"""

FEW = TOO_MANY / 4
"""Retractions per token below which there is room enough.  Between ``FEW`` and ``TOO_MANY`` the degree stays."""

LEAST = 4
"""Fewer retractions than these in a round say nothing."""

SLOWER = 1.25
"""If a token of the round takes so many times as long in doubled tp, tp goes back: KV may be short in the engine as a
whole, of which every degree has the same, or steps of large batches slow there.  Rounds vary by 20%."""

QUIET = 4
"""Number of rounds in a row with few retractions after which tp is halved."""

LONGEST_QUIET = 64
"""Each time that a lower degree turns out to be too low, twice as many quiet rounds are asked for, up to so many.

Where doubling did not pay it is tried again after so many crowded rounds."""


class StartDegree:
    """The rule, for rounds of one kind.

    Args:
        degrees: candidates, ascending; the first round starts in the lowest.

    Attributes:
        tp: degree in which the next round starts, unless the policy chooses a higher one.
    """

    def __init__(self, degrees: Sequence[int]) -> None:
        self._degrees = degrees
        self.tp = degrees[0]
        self._quiet, self._patience, self._lowered = 0, QUIET, False
        self._before = math.inf
        """Seconds of a token before tp was doubled for the last round; infinite if it was not."""
        self._in_vain = 0
        """Crowded rounds in which doubling is not tried, since it did not pay."""

    def observe(self, retractions: int, tokens: int, seconds: float) -> int:
        """Learn from a round that is over; returns ``tp`` for the next one.

        Args:
            retractions: requests put back for want of KV in it; ``tokens``: generated in it.
            seconds: time from its first request to its last response.
        """
        rate = retractions / max(tokens, 1) if retractions >= LEAST else 0.0
        pace, before, self._before = seconds / max(tokens, 1), self._before, math.inf
        self._quiet = self._quiet + 1 if rate < FEW else 0
        if pace > SLOWER * before:
            self._change(-1)
            self._lowered, self._in_vain = False, LONGEST_QUIET
        elif rate > TOO_MANY:
            self._double(pace)
        elif self._quiet >= self._patience:
            self._change(-1)
        return self.tp

    def _double(self, pace: float) -> None:
        if self._lowered:
            self._patience = min(2 * self._patience, LONGEST_QUIET)
        if self._in_vain:
            self._in_vain -= 1
        elif self._change(1):
            self._before = pace

    def _change(self, by: int) -> bool:
        """One degree up or down, if there is one."""
        old, place = self.tp, self._degrees.index(self.tp) + by
        self.tp = self._degrees[min(max(place, 0), len(self._degrees) - 1)]
        self._lowered, self._quiet = self.tp < old, 0
        return self.tp != old


MOST_KINDS = 256
"""Kinds of rounds that are remembered; the oldest is forgotten first."""


class RoundKind(NamedTuple):
    """What a round is known by when it begins: what its client calls it, and its ``requests``; 0: not known."""

    name: str = ""
    requests: int = 0


class StartDegrees:
    """One :class:`StartDegree` for each kind of round.

    RollPacker has one for all.  Its short and long rounds need different room.  Rounds are of one kind if their clients
    call them the same, and their expected numbers of requests are alike (within a factor of about √2).
    """

    def __init__(self, degrees: Sequence[int]) -> None:
        self._degrees = degrees
        self._kinds: dict[tuple[str, int], StartDegree] = {}

    def get_start_degree(self, kind: RoundKind) -> StartDegree:
        """Start degree of rounds of a kind; a new size begins as rounds of its name and unknown size do."""
        size = round(2 * math.log2(kind.requests)) if kind.requests else -1
        unknown = self._kinds.setdefault((kind.name, -1), StartDegree(self._degrees))
        degree = unknown if size < 0 else self._kinds.setdefault((kind.name, size), copy(unknown))
        while len(self._kinds) > MOST_KINDS:  # clients choose the names
            del self._kinds[next(key for key, value in self._kinds.items() if value is not degree)]
        return degree


def hold_start_degree(policy: Policy) -> Policy:
    """The policy, in rounds that start in ``Snapshot.start`` or above and do not go below it.

    Before the first request of a round it goes there at once.  In the middle of one (weights were updated) it waits as
    before any raise.
    """

    def decide(snapshot: Snapshot, history: LengthHistory) -> Decision:
        if not snapshot.requests:
            return policy(snapshot, history)
        degrees = tuple(tp for tp in snapshot.degrees if tp >= snapshot.start or tp == snapshot.tp)
        decision = policy(replace(snapshot, degrees=degrees), history)
        waits = snapshot.now - snapshot.last_abort < RETRY_SECONDS
        waits |= snapshot.peak > 0 and snapshot.now - snapshot.last_switch < SETTLE_SECONDS
        return decision if waits else replace(decision, tp=max(decision.tp, snapshot.start))

    return decide
