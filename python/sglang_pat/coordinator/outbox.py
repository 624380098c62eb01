"""Where the coordinator's effects go: its only way to act."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_pat import messages as m
from sglang_pat.policies.snapshot import Decision, Snapshot


class Outbox(Protocol):
    """Where the coordinator's effects go."""

    def to_leader(self, rank: int, obj: Any) -> None: ...
    def to_server(self, obj: Any) -> None: ...
    def switched(self, record: m.SwitchRecord) -> None: ...
    def decided(self, snapshot: Snapshot, decision: Decision) -> None: ...
    def finished(self, response: m.Finished) -> None: ...
