"""Which of several engines gets the next request.  Pure: no clock, no sockets.

A request goes to where it decodes at once, and there to the engine with the fewest requests a GPU; where all engines
are full, to the one that is expected to be done first.  A session stays where its prefix is, as long as that engine is
not much busier than the least busy one: a conversation that is never moved holds up the end of a step while other
engines idle (verl #6533), and one that is moved at every small difference loses its prefix for nothing (verl #7435).
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

MARGIN = 2
"""Requests that the engine of a session may have more, for each of its replicas, than the least busy one."""
SESSIONS = 10_000
"""Sessions that are remembered."""


@dataclass
class EngineReport:
    """What an engine last said of itself.

    Attributes:
        gpus: it owns.
        replicas: in its layout.
        slots: requests that it decodes at once, in this layout.
        waiting: requests that wait for a slot or for KV.
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


@dataclass
class EngineState:
    """An engine: how many requests are there by our own count, and its last report; ``lost``: it does not answer."""

    in_flight: int = 0
    report: EngineReport = field(default_factory=EngineReport)
    lost: bool = False

    @property
    def full(self) -> bool:
        """Whether one more request would have to wait."""
        mean = self.report.tokens / self.report.running if self.report.running else 0
        return self.in_flight >= self.report.slots or self.report.waiting > 0 or self.report.kv_free < mean

    @property
    def wait(self) -> float:
        """Seconds that one more request would wait, as far as anybody knows."""
        if not self.full:
            return 0.0
        return float("inf") if self.report.expected_seconds is None else self.report.expected_seconds

    @property
    def load(self) -> float:
        """Requests a GPU."""
        return self.in_flight / self.report.gpus


class Balancer:
    """Engines by name, and the sessions they hold.

    Args:
        margin: see :data:`MARGIN`.
        seed: of the choice between equals.
    """

    def __init__(self, margin: float = MARGIN, seed: int = 0) -> None:
        self.engines: dict[str, EngineState] = {}
        self.sessions: OrderedDict[str, str] = OrderedDict()
        self.moved = 0
        """Sessions that went to another engine."""
        self._margin, self._random = margin, random.Random(seed)

    def add(self, name: str) -> None:
        self.engines[name] = EngineState()

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
        if home in usable and self._stays(usable[home], usable[chosen]):
            chosen = home
        self.moved += home is not None and home != chosen
        self.sessions[session] = chosen
        self.sessions.move_to_end(session)
        if len(self.sessions) > SESSIONS:
            self.sessions.popitem(last=False)
        usable[chosen].in_flight += 1
        return chosen

    def _stays(self, home: EngineState, best: EngineState) -> bool:
        if home.wait > best.wait:
            return False
        margin = self._margin * home.report.replicas
        return home.in_flight <= best.load * home.report.gpus + margin

    def release(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is not None and engine.in_flight:
            engine.in_flight -= 1

    def report(self, name: str, report: EngineReport | None) -> None:
        """What an engine says of itself; None: it does not answer."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.lost = report is None
            engine.report = report or engine.report
