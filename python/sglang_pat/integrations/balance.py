"""The choice among several engines for the next request (:class:`Balancer`).  Pure: no clock, no sockets.

A request goes to where it decodes at once, and there to the engine with the fewest requests a GPU; where all engines
are full, to the one that is expected to be done first.  A session stays where its prefix is, as long as that engine is
not much busier than the least busy one: a conversation that is never moved holds up the end of a step while other
engines idle (verl #6533), and one that is moved at every small difference loses its prefix for nothing (verl #7435).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MARGIN = 2
"""Requests that the engine of a session may have more, for each of its replicas, than the least busy one."""
TOLERANCE = 0.1
"""Share by which the wait at the engine of a session may be longer than at the best one."""
PREFILLS = 0.1
"""Share of an engine's requests that may wait, for their prefill, without it being full; one a replica in any case."""
SESSIONS = 1 << 20
"""Number of sessions that are remembered."""


@dataclass(frozen=True)
class EngineReport:
    """What an engine last said of itself.

    Attributes:
        gpus: number of its GPUs that work.
        replicas: that work, in its layout.
        slots: requests that it decodes at once, in this layout.
        waiting: requests that wait for a slot, for KV or for their prefill.
        kv_free: KV tokens that are not in use.
        tokens: KV tokens of the running requests.
        running: requests that decode.
        expected_seconds: until all are done; None if its policy does not predict.
    """

    gpus: int = 1
    replicas: int = 1
    slots: int = 1 << 30
    waiting: int = 0
    kv_free: int = 1 << 60
    tokens: int = 0
    running: int = 0
    expected_seconds: float | None = None

    @classmethod
    def from_status(cls, status: Mapping[str, Any], max_running: int | None) -> EngineReport:
        """A report from what ``/pat/status`` says.

        Args:
            max_running: requests that a replica decodes at once, in any layout; None if memory is the only bound.
        """
        groups, layout = status["groups"], status["layout"]
        replicas = len(groups)  # those that work: others may be lent
        # Right after a switch a replica has not yet said how much KV it has.
        kv_known = all(group["kv_total"] for group in groups)
        return cls(
            gpus=layout["tp"] * replicas,
            replicas=replicas,
            slots=cls.slots if max_running is None else replicas * max_running,
            kv_free=sum(group["kv_total"] - group["tokens"] for group in groups) if kv_known else cls.kv_free,
            expected_seconds=status["expected_seconds"],
            **{name: sum(group[name] for group in groups) for name in ("running", "waiting", "tokens")},
        )


@dataclass
class EngineState:
    """An engine, as far as it is known.

    Attributes:
        in_flight: requests that are there, by our own count; ``reported``: that were when it last reported.
        report: the last one.
        lost: whether it does not answer.
        handle: what the framework calls it by.
    """

    in_flight: int = 0
    reported: int = 0
    report: EngineReport = field(default_factory=EngineReport)
    lost: bool = False
    handle: Any = None

    @property
    def full(self) -> bool:
        """Whether one more request would have to wait for others to end."""
        mean = self.report.tokens / self.report.running if self.report.running else 0
        queued = self.report.waiting > max(self.report.replicas, PREFILLS * self.in_flight)
        return self.in_flight >= self.report.slots or queued or self.report.kv_free < mean

    @property
    def wait(self) -> float:
        """Seconds that one more request would wait, as far as anybody knows; grows with what was sent since."""
        if not self.full:
            return 0.0
        if self.report.expected_seconds is None:
            return float("inf")
        return self.report.expected_seconds * self.in_flight / max(self.reported, 1)

    @property
    def load(self) -> float:
        """Requests in flight for each GPU."""
        return self.in_flight / self.report.gpus


class Balancer:
    """Engines by name, and the sessions they hold.

    Args:
        margin: see :data:`MARGIN`.
    """

    def __init__(self, margin: float = MARGIN) -> None:
        self.engines: dict[str, EngineState] = {}
        self.sessions: OrderedDict[str, str] = OrderedDict()
        self.moved = 0
        """Number of sessions that went to another engine."""
        self._margin, self._random = margin, random.Random(0)

    def add(self, name: str, handle: Any = None) -> None:
        self.engines[name] = EngineState(handle=handle)

    def remove(self, name: str) -> None:
        self.engines.pop(name, None)

    def acquire(self, session: str) -> str:
        """The engine of the next request of ``session``.

        Raises:
            RuntimeError: there is none.
        """
        # One that does not answer is better than none: the framework says then what is wrong with it.
        usable = {name: engine for name, engine in self.engines.items() if not engine.lost} or self.engines
        if not usable:
            raise RuntimeError("No available servers in load balancer")  # verl's clients look for these words
        order = {name: (engine.wait, engine.load) for name, engine in usable.items()}
        least = min(order.values())
        chosen = self._random.choice([name for name, place in order.items() if place == least])
        home = self.sessions.get(session)
        if home in usable and self._should_stay(usable[home], usable[chosen]):
            chosen = home
        self.moved += home is not None and home != chosen
        self.sessions[session] = chosen
        self.sessions.move_to_end(session)
        if len(self.sessions) > SESSIONS:
            self.sessions.popitem(last=False)
        usable[chosen].in_flight += 1
        return chosen

    def _should_stay(self, home: EngineState, best: EngineState) -> bool:
        if home.wait > best.wait * (1 + TOLERANCE):
            return False
        margin = self._margin * home.report.replicas
        return home.in_flight <= best.load * home.report.gpus + margin

    def release(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is not None and engine.in_flight:
            engine.in_flight -= 1

    def report(self, name: str, report: EngineReport | None) -> None:
        """Take an engine's report; None: it does not answer."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.lost = report is None
            if report is not None:
                engine.report, engine.reported = report, engine.in_flight
