"""The decision log (``--pat-log``): one JSON value a line, from which every decision can be taken again.

Events in the order in which the coordinator saw them:

    {"event": "start", "policy": …, "switch_at": …, "profile": file or null, "max_running": … or null}
    {"event": "counting"}: requests and tokens count from here on: the warm-up is over, or a schedule was set
    {"event": "length", "length": tokens, "family": …, "finished": true, "since": tokens}
    {"event": "decision", "snapshot": {…}, "decision": {…}}
    {"event": "step", …}: of whoever trains, it ended here; fields of :class:`~sglang_pat.figures.Figures`

A time of minus infinity (never) is null.  A line that is cut short, before a start, is of an engine that was killed:
the next one has gone on with its file.  Logs are read by ``sglang_pat.replay``.
"""

from __future__ import annotations

import io
import logging
import os
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
        if _is_cut_short(path):
            self._write(b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is not None:
            self._write(encode_event(kind, **fields))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        try:
            while data:  # a disk that becomes full takes a part of it first
                data = data[self._file.write(data) :]
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


def _is_cut_short(path: str) -> bool:
    """Whether a file's last line has no end, as where an engine was killed in the middle of it."""
    if not os.path.isfile(path) or not os.path.getsize(path):
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def encode_event(kind: str, **fields: Any) -> bytes:
    """An event as a line; the requests of a load stand column by column."""
    return msgspec.json.encode({"event": kind, **fields}, enc_hook=lambda array: array.tolist()) + b"\n"
