"""The decision log (``--pat-log``): one JSON value a line, from which every decision can be taken again.

Events in the order in which the coordinator saw them:

    {"event": "start", "policy": …, "switch_at": …, "profile": file or null, "max_running": … or null}
    {"event": "counting"}: requests and tokens count from here on: the warm-up is over, or a schedule was set
    {"event": "length", "length": tokens, "family": …, "finished": true, "since": tokens}
    {"event": "decision", "snapshot": {…}, "decision": {…}}
    {"event": "step", …}: of whoever trains, it ended here; fields of :class:`~sglang_pat.figures.Figures`

A time of minus infinity (never) is null.  Logs are read by ``sglang_pat.replay``.
"""

from __future__ import annotations

import io
import logging
from typing import Any

import msgspec

from sglang_pat.policies.snapshot import Decision, Snapshot

logger = logging.getLogger(__name__)


class EventLog:
    """Appends what the coordinator saw and decided; ends where it cannot be written any more, the engine goes on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: io.FileIO | None = open(path, "ab", buffering=0)
        self._quiet = False

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(encode_event(kind, **fields))
        except OSError as error:
            logger.error("--pat-log %s: %s; nothing more is written to it", self._path, error.strerror)
            self._file.close()
            self._file = None

    def log_decision(self, snapshot: Snapshot, decision: Decision) -> None:
        # An idle engine decides to stay idle ten times a second.
        quiet = snapshot.requests == 0 and decision.tp == snapshot.tp
        if not (quiet and self._quiet):
            self.write("decision", snapshot=snapshot, decision=decision)
        self._quiet = quiet


def encode_event(kind: str, **fields: Any) -> bytes:
    """An event as a line; the requests of a load stand column by column."""
    return msgspec.json.encode({"event": kind, **fields}, enc_hook=lambda array: array.tolist()) + b"\n"
