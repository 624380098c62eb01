"""Take the decisions of an engine's log again: the same inputs must give the same decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_pat import files
from sglang_pat.coordinator import decision_log
from sglang_pat.figures import Figures
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot
from sglang_pat.predict.correction import StepFactor
from sglang_pat.predict.cost import fitted
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import load

TOLERANCE = 1e-9
"""Relative, of estimates: other versions of NumPy round the last digit differently."""

MOST_LINE = 64 << 20
"""Bytes; a line of 8,192 requests has half a million."""


@dataclass
class Replayed:
    """What came of it.

    Attributes:
        decisions: decisions in the log; ``switches``: of these, those to switch.
        different: (line, what the log says, what came out) of those that differ.
        steps: that ended in the log, and ``spent``: how the engine spent them.
        found: all that came out; ``factors``: the last that the log has of the profile's step times.
    """

    decisions: int = 0
    switches: int = 0
    steps: int = 0
    spent: Figures = field(default_factory=Figures)
    different: list[tuple[int, Decision, Decision]] = field(default_factory=list)
    found: list[Decision] = field(default_factory=list)
    factors: Mapping[int, StepFactor] = field(default_factory=dict[int, StepFactor])


class _Player:
    """Takes the decisions again, line by line."""

    def __init__(self, profile: str | None, factors: Mapping[int, StepFactor] | None) -> None:
        self._profile, self._factors = profile, factors
        self._policy: Policy | None = None
        self._profiled: Predictor | None = None
        self._history = LengthHistory()
        self.result = Replayed()

    def play(self, number: int, line: bytes) -> None:
        """Raises ValueError."""
        event = files.decode(line, dict[str, Any])
        kind = event.get("event")
        if kind == "start":
            self._start(decision_log.load_start(event))
        elif self._policy is None:
            raise ValueError("no start event before it")
        elif kind == "length":
            found = decision_log.load_length(event)
            self._history.observe(found.length, found.family, found.finished, found.since)
        elif kind == "step":
            self.result.steps += 1
            self.result.spent += decision_log.load_step(event)
        elif kind == "decision":
            snapshot, logged = decision_log.load_decision(event)
            self._check_known(snapshot)
            self.result.factors = snapshot.factors
            if self._factors is not None:
                snapshot = replace(snapshot, factors=self._factors, doubts={})
            again = self._policy(snapshot, self._history)
            self.result.found.append(again)
            self.result.decisions += 1
            self.result.switches += logged.tp != snapshot.tp
            if not _same(logged, again):
                self.result.different.append((number, logged, again))

    def _start(self, start: decision_log.Start) -> None:
        self._profiled = costs = None
        name = self._profile or start.profile
        if name is not None:
            try:
                self._profiled, costs = fitted(load(name, complete=True))
            except ValueError as error:
                raise _Unusable(error) from None
        self._policy = make_policy(
            start.policy,
            switch_at=start.switch_at,
            predictor=self._profiled,
            costs=costs,
            max_running=start.max_running,
        )
        self._history = LengthHistory.from_dict(start.history)

    def _check_known(self, snapshot: Snapshot) -> None:
        """Raise ValueError for an engine that the profile is not of."""
        if self._profiled is None:
            return
        ranks, degrees = self._profiled.num_ranks, self._profiled.degrees
        if snapshot.num_ranks != ranks:
            raise files.wrong("snapshot.num_ranks", snapshot.num_ranks, f"expected {ranks}, as the profile has")
        if not set(snapshot.degrees) <= set(degrees):
            known = ", ".join(map(str, degrees))
            raise files.wrong("snapshot.degrees", (), f"expected some of {known}, which the profile has")


class _Unusable(Exception):
    """The profile of a log cannot be used."""


def replay_log(
    path: Path, profile: str | None = None, factors: Mapping[int, StepFactor] | None = None
) -> Iterator[Replayed]:
    """Decide again everything that ``path`` says was decided; what has come of it so far, after each line.

    Args:
        profile: file to use instead of the one that the log names.
        factors: of step times, by degree, as if they had been known from the first on; None for what the log has.

    Raises:
        ValueError: not such a log, one line with the file and the line in it; or its profile cannot be used.
    """
    player, number = _Player(profile, factors), 0
    for number, line, last in _lines(path):
        try:
            player.play(number, line)
        except _Unusable as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            # The end of a log is cut short when an engine is killed.
            if last and number > 1 and isinstance(error, files.NotJson):
                break
            ask = "give a decision log (--pat-log) of this version"
            raise ValueError(f"--log {path}, line {number}: {error}; {ask}") from None
        yield player.result
    if number == 0:
        raise ValueError(f"--log {path}: empty")
    yield player.result


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Lines that are not empty, from 1, each with whether it is the last; one at a time, as logs may be long."""
    try:
        with open(path, "rb") as file:
            line, number = file.readline(MOST_LINE + 1), 1
            while line:
                if len(line) > MOST_LINE:
                    allowed = f"at most {MOST_LINE >> 20} MiB are allowed"
                    raise ValueError(f"--log {path}, line {number}: {len(line)} bytes or more, {allowed}")
                following = file.readline(MOST_LINE + 1)
                if line.strip():
                    yield number, line, not following
                line, number = following, number + 1
    except OSError as error:
        raise ValueError(f"--log {path}: {error.strerror}; give a decision log") from None


def _same(a: Decision, b: Decision) -> bool:
    return (
        a.tp == b.tp
        and a.recompute_below == b.recompute_below
        and a.estimates.keys() == b.estimates.keys()
        and all(math.isclose(a.estimates[tp], b.estimates[tp], rel_tol=TOLERANCE) for tp in a.estimates)
    )
