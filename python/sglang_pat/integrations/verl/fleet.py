"""The engines of a verl job, some of which may die (:class:`Fleet`).  The job goes on; the order:

1. A client's request fails.  It takes the engine out of the balancer, and the request goes on elsewhere
   (:class:`~.client.SurvivingClient`).
2. The trainer passes the engine over, where it asks all of something (:func:`~.actors.ask_each`), and so do its ranks,
   where they send weights (``adapter.py``).
3. Before weights are sent, a new engine is started, in the place and under the name of the dead one.
4. It gets the weights with all others, and only then requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from sglang_pat.errors import format_one_line
from sglang_pat.figures import job_log
from sglang_pat.integrations.verl.actors import find_actor, name_server

MOST_STARTS = 3
"""Number of times that engines are started anew for one update of the weights."""
NAME_SECONDS = 30.0
"""Longest wait until Ray gives the name of a dead actor away again."""


class Fleet(CheckpointEngineManager):
    """verl's manager of the replicas of an ``LLMServerManager``, which passes dead engines over and starts new ones.

    Args:
        manager: verl's own, whose place it takes.
        servers: verl's manager of the same replicas.
        joins: whether a new engine is added to the balancer here; else the trainer adds it.
    """

    def __init__(self, manager: CheckpointEngineManager, servers: LLMServerManager, joins: bool) -> None:
        super().__init__(manager.config, manager.actor_wg, manager.replicas)
        self._servers, self._joins = servers, joins
        self._new: list[RolloutReplica] = []
        self._lives: dict[int, ray.ObjectRef] = {}
        """Call to each engine that fails when it dies, by the replica's number."""
        for replica in self.replicas:
            self._watch(replica)
        self._deaths, self._start_seconds = 0, 0.0

    def _watch(self, replica: RolloutReplica) -> None:
        self._lives[replica.replica_rank] = replica.server_handle.live.remote()

    def list_dead(self) -> list[RolloutReplica]:
        """Replicas whose engines have died."""
        if not self._lives:
            return []
        dead, _ = ray.wait(list(self._lives.values()), num_returns=len(self._lives), timeout=0)
        return [replica for replica in self.replicas if self._lives[replica.replica_rank] in dead]

    def count_living(self) -> int:
        """Number of engines that have not died."""
        return len(self.replicas) - len(self.list_dead())

    def take_metrics(self) -> dict[str, float]:
        """Engines that have died since the last call, and seconds that it took to start others."""
        metrics = {"rollout/engine_deaths": float(self._deaths), "rollout/engine_start_seconds": self._start_seconds}
        self._deaths, self._start_seconds = 0, 0.0
        return metrics

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Send the weights to all engines; those that have died are started anew before.

        Raises:
            RuntimeError: an engine could not be started, or engines die again and again; one line.
        """
        for _ in range(MOST_STARTS):
            if dead := self.list_dead():
                begun = time.monotonic()
                await asyncio.gather(*map(self._restart, dead))
                self._deaths += len(dead)
                self._start_seconds += time.monotonic() - begun
            metrics = await super().update_weights(global_steps)
            if not self.list_dead():
                await self._join()
                return metrics
        numbers = ", ".join(str(replica.replica_rank) for replica in self.list_dead())
        raise RuntimeError(
            f"engines {numbers} have died in each of {MOST_STARTS} updates of the weights to step {global_steps}; "
            "their lines in the log, or in Ray's logs of their actors, say why"
        )

    async def _restart(self, replica: RolloutReplica) -> None:
        """Start a new engine in the place of a dead one; it is as the others are: asleep, if they are."""
        number, begun, dead = replica.replica_rank, time.monotonic(), replica.server_handle
        job_log.warning("engine %d has died: a new one is started", number)
        await _free_names(replica)
        replica.servers = []
        try:
            await replica.launch_servers()
            if replica.rollout_mode == RolloutMode.HYBRID:
                await replica.sleep()
        except RayError as error:
            raise RuntimeError(
                f"engine {number} has died, and a new one did not start: {format_one_line(error)}"
            ) from None
        self._watch(replica)
        place = self._servers.server_handles.index(dead)
        self._servers.server_handles[place] = replica.server_handle
        self._servers.server_addresses[place] = replica.server_address
        self._new.append(replica)
        job_log.warning(
            "engine %d was started anew in %.1f s; it gets the present weights", number, time.monotonic() - begun
        )

    async def _join(self) -> None:
        """Give new engines requests, from now on."""
        if self._joins and self._new:
            new = {replica.server_address: replica.server_handle for replica in self._new}
            await self._servers.global_load_balancer.add_servers.remote(new)
        self._new = []

    # -- what verl asks of all replicas ----------------------------------------------------------------

    @auto_await
    async def sleep_replicas(self) -> None:
        await self._ask_living("sleep")

    @auto_await
    async def wake_up_replicas(self) -> None:
        await self._ask_living("wake_up")

    @auto_await
    async def abort_replicas(self, reject_request: bool = False) -> None:
        await self._ask_living("abort_all_requests", reject_request)

    @auto_await
    async def resume_generation_replicas(self) -> None:
        await self._ask_living("resume_generation")

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        await self._ask_living("release_kv_cache")

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        await self._ask_living("resume_kv_cache")

    async def _ask_living(self, method: str, *args: Any) -> None:
        calls = [getattr(replica, method)(*args) for replica in self.replicas]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, RayActorError):
                raise result


def check_some_live(fleets: Sequence[Fleet]) -> None:
    """Raise RuntimeError if all engines have died: verl would train on what had ended before, without what was left."""
    if fleets and not any(fleet.count_living() for fleet in fleets):
        raise RuntimeError(
            "no engine is left: all have died in this step, and some of its responses are missing; their lines in the "
            "log, or in Ray's logs of their actors, say why.  The job may go on from its last checkpoint"
        )


async def _free_names(replica: RolloutReplica) -> None:
    """Have Ray forget the names of a replica's dead actors: it would refuse new ones of the same names."""
    names = [name_server(replica.replica_rank, node, replica.name_suffix) for node in range(replica.nnodes)]
    for actor in replica.servers:
        ray.kill(actor)  # SGLang's servers of a replica's other nodes are of no use alone
    end = time.monotonic() + NAME_SECONDS
    while time.monotonic() < end and any(map(find_actor, names)):
        await asyncio.sleep(0.1)
