"""Leases: what a client holds of the engine, a round or ranks, it holds for as long as it is heard of
(:meth:`Leases.hear`).

A client is known by its name only.  Whatever is heard of it renews all its leases, and nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Lease:
    """What one client holds, for as long as it is heard of.

    Attributes:
        client: name of the client.
        seconds: how long the lease holds while nothing is heard; None: it does not end.
        heard: when the client was last heard of.
    """

    client: str
    seconds: float | None
    heard: float

    def get_seconds_left(self, now: float) -> float | None:
        """Seconds until the lease is over, at least 0; None if it does not end."""
        return None if self.seconds is None else max(0.0, self.heard + self.seconds - now)

    def is_over(self, now: float) -> bool:
        return self.get_seconds_left(now) == 0.0


class Leases:
    """All leases of an engine."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []

    def begin(self, client: str, seconds: float | None, now: float) -> Lease:
        self._leases.append(lease := Lease(client, seconds, now))
        return lease

    def end(self, lease: Lease) -> None:
        self._leases = [other for other in self._leases if other is not lease]

    def hear(self, client: str, now: float) -> None:
        """Renew a client's leases: it has called, or the engine has a request of its."""
        for lease in self._leases:
            if lease.client == client:
                lease.heard = max(lease.heard, now)
