"""Which group each request was given to, told by the groups' loads going up one request after the other."""

from __future__ import annotations

from sglang_pat.demo.progress import Row


class Routes:
    """Life cycle: :meth:`sent` after each request, :meth:`seen` with each new reading of the loads.

    A request stays without a group where the readings leave it open: several counted since the reading
    before and not all by one group, or one that ended in between.
    """

    def __init__(self, loads: list[int]) -> None:
        self._before = loads
        self._open: list[Row] = []

    @property
    def settled(self) -> bool:
        return not self._open

    def sent(self, row: Row) -> None:
        self._open.append(row)

    def seen(self, loads: list[int]) -> None:
        """``loads``: requests of each group, on their way, waiting and running."""
        if len(loads) != len(self._before):  # the layout has changed
            self._before, self._open = loads, []
            return
        more = [new - old for new, old in zip(loads, self._before, strict=True)]
        if min(more) < 0 or sum(more) < len(self._open):
            return
        if max(more) == len(self._open):
            for row in self._open:
                row.group = more.index(max(more))
        self._before, self._open = loads, []


def loads(status: dict) -> list[int]:
    """From a ``/pat/status``."""
    return [group["in_flight"] + group["waiting"] + group["running"] for group in status["groups"]]
