"""The balancer of requests over the nodes of a verl job: ``rollout.router_config_path`` with

router_class: sglang_pat.integrations.verl.balancer.AdaptiveBalancer
margin: 2       # optional, see sglang_pat.integrations.balance
interval: 0.5   # optional, seconds between two looks at the engines
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError

from sglang_pat.errors import format_one_line
from sglang_pat.integrations.balance import MARGIN, Balancer

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.5
"""Seconds between two looks at the engines: a rollout's step takes minutes, and our own count is exact in between."""
ANSWER_SECONDS = 30
"""Seconds without an answer after which an engine is given nothing new."""


class AdaptiveBalancer:
    """verl's ``RequestLoadBalancer``, as a Ray actor; the engines are actors that answer ``load()``.

    Raises:
        ValueError: an unknown option.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        options = {name: value for name, value in config.items() if name != "router_class"}
        margin, interval = options.pop("margin", MARGIN), options.pop("interval", INTERVAL_SECONDS)
        if options:
            raise ValueError(f"router_config_path: {', '.join(options)} is no option of it; there are margin, interval")
        if not interval > 0 or not margin >= 0:
            raise ValueError(f"router_config_path: margin is {margin}, interval {interval}; must be >= 0 and > 0")
        self._balancer, self._interval = Balancer(margin), interval
        self._told: set[str] = set()
        """Names of the engines for which it was logged that their load could not be read."""
        self._watch: asyncio.Task | None = None
        self._add(servers)

    def _add(self, servers: dict[str, Any]) -> None:
        for name, handle in servers.items():
            self._balancer.add(name, handle)

    async def acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        """Name and handle of the engine for the next request of a session."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._refresh_loads())
        name = self._balancer.acquire(request_id)
        return name, self._balancer.engines[name].handle

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._balancer.release(server_id)

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def add_servers(self, servers: dict[str, Any]) -> None:
        self._add(servers)

    async def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            self._balancer.remove(name)

    async def get_all_servers(self) -> list[str]:
        return list(self._balancer.engines)

    async def get_inflight_count(self, server_id: str) -> int:
        engine = self._balancer.engines.get(server_id)
        return engine.in_flight if engine else 0

    async def get_total_inflight(self) -> int:
        return sum(engine.in_flight for engine in self._balancer.engines.values())

    async def clear_sticky_cache(self) -> dict[str, Any]:
        cleared = len(self._balancer.sessions)
        self._balancer.sessions.clear()
        return {"cleared_entries": cleared, "server_loads": self._count_loads()}

    async def get_status(self) -> dict[str, Any]:
        engines = self._balancer.engines
        return {
            "servers": self._count_loads(),
            "total_inflight": await self.get_total_inflight(),
            "active_servers": len(engines),
            "registered_handles": list(engines),
            "moved_sessions": self._balancer.moved,
            "reports": {name: dataclasses.asdict(engine.report) for name, engine in engines.items()},
            "lost": [name for name, engine in engines.items() if engine.lost],
        }

    def _count_loads(self) -> dict[str, int]:
        return {name: engine.in_flight for name, engine in self._balancer.engines.items()}

    async def _refresh_loads(self) -> None:
        asking: dict[str, asyncio.Task] = {}
        while True:
            for name, engine in self._balancer.engines.items():
                if name not in asking or asking[name].done():  # one that hangs does not keep the others waiting
                    asking[name] = asyncio.create_task(self._ask(name, engine.handle))
            await asyncio.sleep(self._interval)

    async def _ask(self, name: str, handle: Any) -> None:
        try:
            report = await asyncio.wait_for(handle.load.remote(), ANSWER_SECONDS)
        except Exception as error:
            # Ray has a dozen ways to say that an actor is gone.  An error inside the actor is none of them: the engine
            # stays in use with what was last known of it.
            if isinstance(error, RayTaskError) or not isinstance(error, (RayError, TimeoutError)):
                if name not in self._told:
                    self._told.add(name)
                    message = format_one_line(error)
                    logger.error("load of engine %s not known, %s: %s", name, type(error).__name__, message)
                return
            report = None
        self._balancer.report(name, report)
