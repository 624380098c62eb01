"""A decision log read: its decisions taken again (the same inputs must give the same decisions), or as a schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from sglang_pat import files
from sglang_pat.config import PREDICTING
from sglang_pat.coordinator.decision_log import BY_DEGREE, LOADS, TIMES
from sglang_pat.figures import Figures
from sglang_pat.policies.families import MAX_CORRELATION
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.policies.snapshot import Decision, Load, Policy, Snapshot
from sglang_pat.predict.correction import StepFactor
from sglang_pat.predict.cost import fitted
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import load

TOLERANCE = 1e-9
"""Relative, of estimates: other versions of NumPy round the last digit differently."""

MOST_LINE = 64 << 20
"""Bytes; a line of 8,192 requests has half a million."""


MOST = (1 << 31) - 1
"""Of requests, and of the tokens of one."""
MOST_RANKS = 1024
MOST_FACTOR, MOST_POWER = 1000.0, 10.0
"""Of step times over those of the profile, and how they may grow with batch and context."""

_Number = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Tokens = Annotated[int, Meta(ge=0, le=MOST)]
_Positive = Annotated[int, Meta(ge=1, le=MOST)]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`~sglang_pat.coordinator.decision_log.dump_start` was given."""

    policy: str
    switch_at: _Positive
    profile: str | None
    max_running: _Positive | None
    history: dict[str, Any]


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`~sglang_pat.coordinator.decision_log.dump_length` was given."""

    length: _Tokens
    family: _Number
    finished: bool
    since: _Tokens = 0


class _Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A ``decision`` event."""

    snapshot: dict[str, Any]
    decision: Decision


class _History(msgspec.Struct, frozen=True, kw_only=True):
    """What :meth:`LengthHistory.to_dict` gives."""

    prior: tuple[Annotated[float, Meta(ge=-100, le=100)], Annotated[float, Meta(ge=1e-3, le=100)]] | None
    window: Annotated[int, Meta(ge=1, le=1 << 20)]
    strength: Annotated[float, Meta(ge=1e-6, le=1e6)]
    correlation: Annotated[float, Meta(ge=0, le=MAX_CORRELATION)]
    observed: Annotated[int, Meta(ge=0, le=1 << 62)]
    responses: list[tuple[_Tokens, _Number, bool]]


def load_step(event: Mapping[str, Any]) -> Figures:
    """A ``step`` event."""
    return files.convert(event, Figures)


def load_start(event: Mapping[str, Any]) -> Start:
    """A ``start`` event; its ``history`` is what :meth:`LengthHistory.from_dict` takes."""
    start = files.convert(event, Start)
    files.convert(start.history, _History)
    return start


def load_length(event: Mapping[str, Any]) -> Length:
    """A ``length`` event."""
    return files.convert(event, Length)


def load_decision(event: Mapping[str, Any]) -> tuple[Snapshot, Decision]:
    """The snapshot and the answer of a ``decision`` event."""
    found = files.convert(event, _Decided)
    return snapshot_from_dict(found.snapshot), found.decision


def snapshot_from_dict(values: dict[str, Any]) -> Snapshot:
    """Inverse of ``decision_log.snapshot_to_dict``; what older logs do not have is empty."""
    never = [name for name in TIMES if values.get(name, 0.0) is None]
    snapshot = files.convert(values | dict.fromkeys(never, 0.0), Snapshot, _column)
    snapshot = replace(snapshot, **dict.fromkeys(never, -math.inf))
    _check(snapshot)
    return snapshot


def _column(kind: type, values: Any) -> Any:
    """A column of requests."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind} is not in a log")
    return np.array(files.convert(values, list[_Number]), dtype=np.int64)


def _check(snapshot: Snapshot) -> None:
    """Whether the parts of a snapshot fit each other; raises ValueError."""
    tp, ranks = snapshot.tp, snapshot.num_ranks
    if not 1 <= ranks <= MOST_RANKS:
        raise files.wrong("snapshot.num_ranks", ranks, f"expected 1 to {MOST_RANKS}")
    degrees = list(snapshot.degrees)
    if degrees != sorted(set(degrees)) or any(degree < 1 or ranks % degree for degree in degrees):
        raise files.wrong("snapshot.degrees", degrees, f"expected ascending divisors of the {ranks} ranks")
    if tp not in degrees:
        raise files.wrong("snapshot.tp", tp, "expected one of the degrees")
    for name in BY_DEGREE:
        for degree, found in getattr(snapshot, name).items():
            number, *powers = found if isinstance(found, StepFactor) else (found,)
            if degree not in degrees or not 0 <= number <= MOST_FACTOR:
                raise files.wrong(f"snapshot.{name}", number, f"expected numbers from 0 to {MOST_FACTOR}, by degree")
            if not all(-MOST_POWER <= power <= MOST_POWER for power in powers):
                expected = f"expected powers from -{MOST_POWER} to {MOST_POWER}, by degree"
                raise files.wrong(f"snapshot.{name}", powers, expected)
    for name, most in (("requests", MOST), ("peak", MOST), ("arrived", 1 << 62)):
        if not 0 <= (getattr(snapshot, name) or 0) <= most:
            raise files.wrong(f"snapshot.{name}", getattr(snapshot, name), f"expected 0 to {most}")
    for name in LOADS:
        load: Load = getattr(snapshot, name)
        columns = {field.name: getattr(load, field.name) for field in fields(Load)}
        for column, numbers in columns.items():
            where = f"snapshot.{name}.{column}"
            if len(numbers) != len(load):
                expected = f"expected as many numbers as in prompt, {len(load)}; there are {len(numbers)}"
                raise files.wrong(where, (), expected)
            most = None if column == "family" else MOST
            if column == "replica" and name == "load":
                most = ranks // tp - 1
            if most is not None and len(numbers) and not 0 <= numbers.min() <= numbers.max() <= most:
                raise files.wrong(where, (), f"expected numbers from 0 to {most}")


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
            self._start(load_start(event))
        elif self._policy is None:
            raise ValueError("no start event before it")
        elif kind == "length":
            found = load_length(event)
            self._history.observe(found.length, found.family, found.finished, found.since)
        elif kind == "step":
            self.result.steps += 1
            self.result.spent += load_step(event)
        elif kind == "decision":
            snapshot, logged = load_decision(event)
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

    def _start(self, start: Start) -> None:
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


def read_schedule(path: Path) -> list[dict[str, int]]:
    """The decisions to switch in a log, as entries of a schedule (``POST /pat/schedule``): by generated tokens.

    Raises:
        ValueError: not such a log; or of a policy that does not predict, which says nothing of tokens.  One line.
    """
    entries: list[dict[str, int]] = []
    ended = 0
    for number, line, last in _lines(path):
        try:
            event = files.decode(line, dict[str, Any])
            kind = event.get("event")
            if kind == "start" and (policy := load_start(event).policy) not in PREDICTING:
                raise _Unusable(f"it is of the policy {policy}, which another engine repeats by itself")
            if kind == "counting":
                ended, entries = 0, []
            elif kind == "length":
                ended += load_length(event).length
            elif kind == "decision":
                snapshot, decision = load_decision(event)
                if decision.tp != (entries[-1]["tp"] if entries else snapshot.tp):
                    entries.append({"tp": decision.tp, "tokens": ended + int(snapshot.load.output.sum())})
        except (ValueError, _Unusable) as error:
            if last and number > 1 and isinstance(error, files.NotJson):
                break
            raise ValueError(f"--log {path}, line {number}: {error}") from None
    return entries


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
