"""The decision log (``--pat-log``): one JSON value a line, from which every decision can be taken again.

Events in the order in which the coordinator saw them:

    {"event": "start", "policy": …, "switch_at": …, "profile": file or null, "max_running": … or null, "history": …}
    {"event": "counting"}
    {"event": "length", "length": tokens, "family": …, "finished": true}
    {"event": "decision", "snapshot": {…}, "decision": {…}}
    {"event": "step", …}: of whoever trains, it ended here; fields of :class:`~sglang_pat.figures.Figures`

A time of minus infinity (never) is null.  Logs are read by ``sglang_pat.replay.log``.
"""

from __future__ import annotations

import io
import logging
import math
from dataclasses import asdict, fields
from typing import Any

import msgspec

from sglang_pat.figures import Figures
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.snapshot import Decision, Load, Snapshot

logger = logging.getLogger(__name__)

TIMES = ("last_arrival", "last_switch", "last_abort")
"""Fields of a snapshot that may be minus infinity."""
LOADS = ("load", "coming")
BY_DEGREE = ("factors", "doubts")


class EventLog:
    """Appends what the coordinator saw and decided; ends where it cannot be written any more, the engine goes on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: io.FileIO | None = open(path, "ab", buffering=0)
        self._quiet = False

    def write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(event) + b"\n")
        except OSError as error:
            logger.error("--pat-log %s: %s; nothing more is written to it", self._path, error.strerror)
            self._file.close()
            self._file = None

    def decided(self, snapshot: Snapshot, decision: Decision) -> None:
        # An idle engine decides to stay idle ten times a second.
        quiet = snapshot.requests == 0 and decision.tp == snapshot.tp
        if not (quiet and self._quiet):
            self.write(dump_decision(snapshot, decision))
        self._quiet = quiet


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


def dump_decision(snapshot: Snapshot, decision: Decision) -> dict[str, Any]:
    """A policy was asked, and answered."""
    return {
        "event": "decision",
        "snapshot": snapshot_to_dict(snapshot),
        "decision": asdict(decision) | {"estimates": {str(tp): s for tp, s in decision.estimates.items()}},
    }


def snapshot_to_dict(snapshot: Snapshot) -> dict[str, Any]:
    """JSON values of a snapshot; the requests column by column."""
    values = {f.name: getattr(snapshot, f.name) for f in fields(Snapshot)}
    values["degrees"] = list(snapshot.degrees)
    for name in LOADS:
        values[name] = {f.name: getattr(values[name], f.name).tolist() for f in fields(Load)}
    for name in TIMES:
        values[name] = values[name] if math.isfinite(values[name]) else None
    for name in BY_DEGREE:
        values[name] = {str(tp): number for tp, number in values[name].items()}
    return values
