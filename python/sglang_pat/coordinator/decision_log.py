"""The decision log: one JSON value a line, from which every decision can be taken again (``sglang_pat.replay --log``).

Events in the order in which the coordinator saw them:

    {"event": "start", "policy": …, "switch_at": …, "profile": file or null, "max_running": … or null, "history": …}
    {"event": "counting"}
    {"event": "length", "length": tokens, "family": …, "finished": true}
    {"event": "decision", "snapshot": {…}, "decision": {…}}
    {"event": "step", …}: of whoever trains, it ended here; fields of :class:`~sglang_pat.figures.Figures`

``dump_*`` make plain values, ``load_*`` read them back and raise ValueError, one line with the field, for what cannot
be; a time of minus infinity (never) is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from sglang_pat import files
from sglang_pat.figures import Figures
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Load, Snapshot
from sglang_pat.predict.correction import StepFactor

_TIMES = ("last_arrival", "last_switch", "last_abort")
_LOADS = ("load", "coming")
_BY_DEGREE = ("factors", "doubts")

MOST = (1 << 31) - 1
"""Of requests, and of the tokens of one."""
MOST_RANKS = 1024
MOST_FACTOR, MOST_POWER = 1000.0, 10.0
"""Of step times over those of the profile, and how they may grow with batch and context."""

_Number = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Tokens = Annotated[int, Meta(ge=0, le=MOST)]
_Positive = Annotated[int, Meta(ge=1, le=MOST)]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`dump_start` was given."""

    policy: str
    switch_at: _Positive
    profile: str | None
    max_running: _Positive | None
    history: dict[str, Any]


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`dump_length` was given."""

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
    responses: list[tuple[_Tokens, _Number, bool]]


def dump_start(
    policy: str,
    *,
    switch_at: int,
    history: LengthHistory,
    profile: str | None = None,
    max_running: int | None = None,
) -> dict[str, Any]:
    """First line: what :func:`~sglang_pat.policies.registry.make_policy` was given, and the history at the start."""
    return {
        "event": "start",
        "policy": policy,
        "switch_at": switch_at,
        "profile": profile,
        "max_running": max_running,
        "history": history.to_dict(),
    }


def dump_counting() -> dict[str, Any]:
    """Requests and tokens count from here on: the server's warm-up is over, or a schedule was set."""
    return {"event": "counting"}


def dump_length(length: int, family: int, finished: bool, since: int = 0) -> dict[str, Any]:
    """An argument list of :meth:`LengthHistory.observe`; ``since`` only where it is not 0."""
    event = {"event": "length", "length": int(length), "family": int(family), "finished": bool(finished)}
    return event | {"since": int(since)} if since else event


def dump_step(step: Figures) -> dict[str, Any]:
    """A step ended."""
    return {"event": "step", **asdict(step)}


def load_step(event: Mapping[str, Any]) -> Figures:
    """A ``step`` event."""
    return files.convert(event, Figures)


def dump_decision(snapshot: Snapshot, decision: Decision) -> dict[str, Any]:
    """A policy was asked, and answered."""
    return {
        "event": "decision",
        "snapshot": snapshot_to_dict(snapshot),
        "decision": asdict(decision) | {"estimates": {str(tp): s for tp, s in decision.estimates.items()}},
    }


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


def snapshot_to_dict(snapshot: Snapshot) -> dict[str, Any]:
    """JSON values of a snapshot; the requests column by column."""
    values = {f.name: getattr(snapshot, f.name) for f in fields(Snapshot)}
    values["degrees"] = list(snapshot.degrees)
    for name in _LOADS:
        values[name] = {f.name: getattr(values[name], f.name).tolist() for f in fields(Load)}
    for name in _TIMES:
        values[name] = values[name] if math.isfinite(values[name]) else None
    for name in _BY_DEGREE:
        values[name] = {str(tp): number for tp, number in values[name].items()}
    return values


def snapshot_from_dict(values: dict[str, Any]) -> Snapshot:
    """Inverse of :func:`snapshot_to_dict`; what older logs do not have is empty."""
    never = [name for name in _TIMES if values.get(name, 0.0) is None]
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
    for name in _BY_DEGREE:
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
    for name in _LOADS:
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
