"""The decision log: one JSON value a line, from which every decision can be taken again (``sglang_pat.replay --log``).

Events in the order in which the coordinator saw them:

    {"event": "start", "policy": …, "switch_at": …, "profile": file or null, "max_running": … or null, "history": …}
    {"event": "length", "length": tokens, "family": …, "finished": true}
    {"event": "decision", "snapshot": {…}, "decision": {…}}

``dump_*`` make plain values, ``load_*`` read them back; a time of minus infinity (never) is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Load, Snapshot

_TIMES = ("last_arrival", "last_switch", "last_abort")
_LOADS = {"load", "coming"}
_BY_DEGREE = ("factors", "doubts")


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


def dump_length(length: int, family: int, finished: bool, since: int = 0) -> dict[str, Any]:
    """An argument list of :meth:`LengthHistory.observe`; ``since`` only where it is not 0."""
    event = {"event": "length", "length": int(length), "family": int(family), "finished": bool(finished)}
    return event | {"since": int(since)} if since else event


def dump_decision(snapshot: Snapshot, decision: Decision) -> dict[str, Any]:
    """A policy was asked, and answered."""
    return {
        "event": "decision",
        "snapshot": snapshot_to_dict(snapshot),
        "decision": asdict(decision) | {"estimates": {str(tp): s for tp, s in decision.estimates.items()}},
    }


def load_decision(event: Mapping[str, Any]) -> tuple[Snapshot, Decision]:
    """The snapshot and the answer of a ``decision`` event."""
    found = event["decision"]
    estimates = {int(tp): seconds for tp, seconds in found["estimates"].items()}
    return snapshot_from_dict(event["snapshot"]), Decision(**found | {"estimates": estimates})


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
    """Inverse of :func:`snapshot_to_dict`."""
    values = dict(values)
    for name in _TIMES:
        values[name] = -math.inf if values[name] is None else values[name]
    values["degrees"] = tuple(values["degrees"])
    for load in _LOADS & values.keys():  # logs of before rounds were foreseen have no "coming"
        values[load] = Load(**{name: np.array(column, dtype=np.int64) for name, column in values[load].items()})
    for name in _BY_DEGREE:  # nor have those of before profiles were corrected any factors
        values[name] = {int(tp): number for tp, number in values.get(name, {}).items()}
    return Snapshot(**values)
