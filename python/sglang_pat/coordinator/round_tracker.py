"""Rounds of requests (:class:`RoundTracker`), as clients announce them.

Where nobody does: in RL one is much like the one before, so its size tells when all are in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from sglang_pat.coordinator.leases import Lease, Leases
from sglang_pat.messages import BeginRound, EndRound
from sglang_pat.policies.rules import SETTLE_SECONDS
from sglang_pat.policies.snapshot import NO_LOAD, Load
from sglang_pat.policies.start import RoundKind, StartDegrees

ROUNDS = 4
"""Rounds that are remembered: a validation set among batches of training is not forgotten at once."""

ALIKE = 2
"""Number of remembered rounds that must have had the largest size before it is believed: a single one may have been a
warm-up, or one turn of agents that all finished theirs together."""

WHOLE = 0.9
"""Share of a round's requests that must have been in the engine at once for them to stand for the next round."""

PROMPT_TOKENS = 256
"""Tokens of a prompt, as long as nobody has said or seen any."""

MOST_OPEN = 64
"""Most rounds that are open at once; one more takes the place of the oldest."""


class RoundTracker:
    """What came in this round, and how many came in earlier ones.

    A round that nobody announced ends when the engine becomes empty.  One of a single request (health probe, warm-up)
    does not count.  One that was announced ends when its client says so, or when its lease is over.  What it has
    aborted may be seen for a while after that: it counts in no round.

    Args:
        degrees: in which rounds may start.

    Attributes:
        open: rounds that were announced and are not over, by name.  Several count as one, with the sum of their
            requests.
        peak: most requests in the engine in this round.
        last: time of the last arrival, or minus infinity.
        came: requests that came in this round; ``switches``: switches in it.
        retracted: requests put back for want of KV in this round; ``tokens``: generated in it, by responses that ended.
    """

    def __init__(self, degrees: Sequence[int] = (1,)) -> None:
        self.leases = Leases()
        self.open: dict[str, BeginRound] = {}
        self._missing: dict[str, int] = {}
        """Requests of each open round that have not come."""
        self._held: dict[str, Lease] = {}
        self.peak = 0
        self.last = float("-inf")
        self.came = self.switches = self.retracted = self.tokens = 0
        self._starts, self._kind = StartDegrees(degrees), RoundKind()
        self._began = self._last_end = float("-inf")
        self._here = self._left = 0
        """Requests in the engine, and those of them that earlier rounds have left there."""
        self._ends = 0
        """Number of responses of this round that ended."""
        self._ended = False
        """Whether a response of this round had tokens."""
        self._sizes: deque[int] = deque(maxlen=ROUNDS)
        self._seen = self._last_round = NO_LOAD
        self._prompt_tokens = PROMPT_TOKENS

    def update_announced_round(self, message: BeginRound | EndRound, now: float) -> None:
        """Open or close the round that a client says begins or ends."""
        self.leases.hear(message.name, now)
        self._end(message.name)
        if isinstance(message, BeginRound):
            if len(self.open) >= MOST_OPEN:
                self._close(next(iter(self.open)))
            self.open[message.name] = message
            self._missing[message.name] = message.requests or 0
            self._held[message.name] = self.leases.begin(message.name, message.lease_seconds, now)
            if not self._here:
                self._reset_round()

    def end_silent_rounds(self, now: float) -> None:
        """End the rounds whose clients were not heard of for too long."""
        for name in [name for name, lease in self._held.items() if lease.is_over(now)]:
            self._end(name)

    def _end(self, name: str) -> None:
        if self._close(name) and not self.open:
            self._finish_round()

    def _close(self, name: str) -> bool:
        """Close a round; returns whether it was open."""
        if name not in self.open:
            return False
        self.leases.end(self._held.pop(name))
        del self._missing[name], self.open[name]
        return True

    @property
    def missing(self) -> int:
        """Number of announced requests that have not come."""
        return sum(self._missing.values())

    def get_status(self, now: float) -> dict[str, Any]:
        """The rounds in ``/pat/status``."""
        return {
            "open": [
                msgspec.to_builtins(round_) | {"lease_left": self._held[name].get_seconds_left(now)}
                for name, round_ in self.open.items()
            ],
            "missing": self.missing,
            "start": self.start,
        }

    @property
    def expected(self) -> int:
        """Expected requests of a round: those of the largest of the recent ones; 0 if only one of them had so many."""
        largest = max(self._sizes, default=0)
        return largest if self._sizes.count(largest) >= ALIKE else 0

    @property
    def complete(self) -> bool:
        """Whether no more requests are expected: all have come that were announced, or exactly as many as in a
        round."""
        return not self.missing if self._sized else 0 < self.came == self.expected

    @property
    def only_probes(self) -> bool:
        """Whether nothing in the engine counts: health probes alone."""
        return self.peak > 0 and not self.came

    @property
    def start(self) -> int:
        """Lowest degree of this round, or of the next one if none has begun, by the retractions of earlier ones."""
        return self._starts.get_start_degree(self._kind if self.came else self._expect_kind()).tp

    def _expect_kind(self) -> RoundKind:
        """Kind of the round that is about to come."""
        name = "+".join(sorted({round_.kind for round_ in self.open.values()} - {""}))
        # Of one that was announced without its size nobody knows whether it is like the others that came.
        return RoundKind(name, self.missing if self._sized else 0 if self.open else self.expected)

    @property
    def _sized(self) -> bool:
        """Whether the round was announced with its size."""
        return bool(self.open) and all(round_.requests for round_ in self.open.values())

    def predict_round_load(self, now: float) -> Load:
        """The load of the round that is about to come, or coming in, as it is before its first token: as announced, or
        the last one of that size.  Empty if no size is expected, all have come, or no more seem to come; also when the
        first response of one that was announced has ended: what comes then comes in place of others."""
        if self.only_probes:
            return NO_LOAD
        if self.came and now - self.last >= SETTLE_SECONDS:
            return NO_LOAD
        if self._sized:
            missing = not self._ended and self.missing
            return _make_announced_load(self.open.values(), self._prompt_tokens) if missing else NO_LOAD
        return NO_LOAD if self.came >= self.expected else self._last_round

    def record_load(self, load: Load) -> None:
        """Note requests that were in the engine at once."""
        if len(load) >= len(self._seen):  # of the later one more is known: siblings
            self._seen = load

    def record_arrival(self, now: float, sample: bool = True, name: str = "") -> str:
        """A request goes into the engine; returns whose round it is of, "" if nobody can say.

        Args:
            sample: a new one, as were announced.
            name: name of the round, as the request says; "": it does not say.
        """
        self.last = now
        if not self.came:
            self._kind, self._began = self._expect_kind(), now
        self.came += 1
        name = name or self._guess_round(sample)
        if sample and self._missing.get(name):
            self._missing[name] -= 1
        self.leases.hear(name, now)
        return name

    def _guess_round(self, sample: bool) -> str:
        """The round of a request that does not name it: among those that it may belong to the one that began last,
        as an older one may be of a client that is gone.  A round that has all its samples gets no more; "": there is
        none."""
        may = [name for name, missing in self._missing.items() if missing] if sample else [*self.open]
        may = may or [name for name, round_ in self.open.items() if not round_.requests]
        return may[-1] if may else ""

    def record_response_end(self, now: float, sample: bool = True) -> None:
        """Note that a response has ended; ``sample``: it has tokens."""
        self._last_end = now
        if self._left:
            self._left -= 1
        else:
            self._ends += 1
            self._ended |= sample

    def update_request_count(self, requests: int) -> None:
        """Note how many requests are in the engine now; called after each event, or the end of a round may be
        missed."""
        self._here = requests
        # What was aborted in a queue goes without a word: no more are left than those that are not of this round.
        self._left = max(min(self._left, requests - self.came + self._ends), 0)
        if requests:
            self.peak = max(self.peak, requests - self._left)
            return
        if not self.open or not self.came:
            self._finish_round()

    def _finish_round(self) -> None:
        if self.came > 1:
            self._sizes.append(self.came)
            if self.came == self.expected:
                self._last_round = _make_fresh_load(self._seen) if len(self._seen) >= WHOLE * self.came else NO_LOAD
        self._reset_round()

    def _reset_round(self) -> None:
        if self.came > 1:
            self._starts.get_start_degree(self._kind).observe(
                self.retracted, self.tokens, max(self._last_end - self._began, 0.0)
            )
            if len(self._seen):
                self._prompt_tokens = round(self._seen.prompt.mean())
        self.peak = self.came = self.switches = self.retracted = self.tokens = self._ends = 0
        self._left, self._ended = self._here, False
        self._seen = NO_LOAD


def _make_fresh_load(load: Load) -> Load:
    """A load of the same prompts with other responses: nothing is generated yet, nothing known of the families."""
    _, families = np.unique(load.family, return_inverse=True)
    return replace(load, output=np.zeros_like(load.output), family=-1 - families)


def _make_announced_load(rounds: Iterable[BeginRound], prompt_tokens: int) -> Load:
    """All requests of these rounds, whose sizes are known; ``prompt_tokens``: of those that do not say."""
    parts: list[np.ndarray] = []
    families = 1  # below 0, as no hash of a prompt is
    for round_ in rounds:
        number = np.arange(round_.requests or 0)
        prompts = round_.prompts or len(number)
        family = -families - number * prompts // len(number)
        prompt = round_.prompt_tokens or prompt_tokens
        parts.append(np.array([0 * number + prompt, 0 * number + round_.max_new_tokens, family]))
        families += prompts
    prompt, limit, family = np.concatenate(parts, axis=1)
    return Load(prompt=prompt, output=0 * prompt, limit=limit, family=family, replica=0 * prompt)
