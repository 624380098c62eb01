"""The engines of a verl job, some of which may die (:class:`Fleet`).  The job goes on; the order:

1. A client's request fails.  It takes the engine out of the balancer, and the request goes on elsewhere
   (:class:`~.client.SurvivingClient`).
2. The trainer passes the engine over, where it asks all of something (:func:`ask_each`), and so do its ranks,
   where they send weights (``adapter.py``).
3. A new engine is started, in the place and under the name of the dead one: while the others generate, if they still
   have the GPUs, else before weights are sent.
4. It gets the weights with all others, and only then requests.

Of engines with GPUs of their own there may be more or fewer from one update to the next: :mod:`~.resize` says how many
are wanted, and Ray what there is room for.  If a node is gone, so are its engines.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from verl.checkpoint_engine import CheckpointEngineManager
from verl.plugin.platform import get_platform
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from sglang_pat.errors import format_one_line
from sglang_pat.figures import job_log
from sglang_pat.integrations.verl import resize

MOST_STARTS = 3
"""Number of times that engines are started anew for one update of the weights."""
NAME_SECONDS = 30.0
"""Longest wait until Ray gives the name of a dead actor away again."""
ROOM_SECONDS = 5.0
"""Longest wait until Ray counts as free what an engine had whose workers have died."""


class Fleet(CheckpointEngineManager):
    """verl's manager of the replicas of an ``LLMServerManager``, which passes dead engines over and starts new ones.

    Args:
        manager: verl's own, whose place it takes.
        servers: verl's manager of the same replicas.
        balancer: actor of the balancer through which they get requests; may be that of another manager of servers.
        own_gpus: whether the engines have GPUs of their own; an attribute, too.
    """

    def __init__(
        self, manager: CheckpointEngineManager, servers: LLMServerManager, balancer: ActorHandle, own_gpus: bool = False
    ) -> None:
        super().__init__(manager.config, manager.actor_wg, manager.replicas)
        self._servers, self._balancer, self.own_gpus = servers, balancer, own_gpus
        self._count = resize.publish(len(self.replicas), self._find_why_fixed()) if own_gpus else None
        self._last_number = max((replica.replica_rank for replica in self.replicas), default=0)
        self._lacks = ""
        """What Ray lacks for the engines that are wanted."""
        self._leaving: list[RolloutReplica] = []
        """Engines that get no requests any more, and still send what they had."""
        self._new: list[RolloutReplica] = []
        self._asleep: list[RolloutReplica] = []
        """Engines that have left the round, and sleep until the next update."""
        self._step: int | None = None
        """verl's version of the weights that were sent last."""
        self._lives: dict[int, ray.ObjectRef] = {}
        """Call to each engine that fails when it dies, by the replica's number."""
        for replica in self.replicas:
            self._watch(replica)
        self._starts: dict[int, Future[RolloutReplica]] = {}
        """New engines that are being started while others generate, by the dead one's number."""
        self._threads, self._have_gpus = ThreadPoolExecutor(), own_gpus
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
        return len(self.replicas) - len(self.list_dead())

    def count_awake(self) -> int:
        """Number of engines that have neither died nor left the round."""
        dead = self.list_dead()
        return sum(replica not in dead and replica not in self._asleep for replica in self.replicas)

    def take_metrics(self) -> dict[str, float]:
        """Engines that there are, that have died since the last call, and seconds that the job waited for others."""
        metrics = {
            "rollout/engines": float(len(self.replicas)), "rollout/engine_deaths": float(self._deaths),
            "rollout/engine_start_seconds": self._start_seconds,
        }  # fmt: skip
        self._deaths, self._start_seconds = 0, 0.0
        return metrics

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Send the weights to all engines; those that have died are started anew before, and new ones that are wanted.

        Args:
            global_steps: verl's version of the weights; None, as after a validation: they are those sent last.

        Raises:
            RuntimeError: an engine could not be started, or engines die again and again; one line.
        """
        self._step, self._asleep = self._step if global_steps is None else global_steps, []
        metrics: dict[str, Any] = {}
        dead: list[RolloutReplica] = []
        for _ in range(MOST_STARTS):
            if dead and self.backend == "naive":  # the others are awake now, and verl wakes up those that sleep
                await self._ask_living("sleep")
            await self._renew()
            try:
                metrics = await super().update_weights(self._step)
                dead = self.list_dead()
            except RayActorError:
                dead = await self._list_gone() if self._count else []
                if not dead:  # a trainer has died
                    raise
                await self.resume_kv_cache_replicas()  # the next update releases it, which SGLang does not twice
            while self._leaving:
                _release(self._leaving.pop())
            if not dead:
                if self._new:  # they get requests from now on
                    new = {replica.server_address: replica.server_handle for replica in self._new}
                    await self._balancer.add_servers.remote(new)
                self._new, self._have_gpus = [], True
                return metrics
        numbers = ", ".join(str(replica.replica_rank) for replica in dead)
        raise RuntimeError(
            f"engines {numbers} have died in each of {MOST_STARTS} updates of the weights to step {self._step}; "
            "their lines in the log, or in Ray's logs of their actors, say why"
        )

    async def _renew(self) -> None:
        """Have as many living engines as are wanted, and as Ray has room for."""
        await self._take_started()
        begun, dead = time.monotonic(), self.list_dead()
        gone = await self._list_gone()
        target = await self._count.get_wanted.remote() if self._count else len(self.replicas)
        staying = sorted((replica for replica in self.replicas if replica not in gone), key=lambda one: one in dead)
        new, leaving = target - len(staying), [*gone, *staying[target:]]
        if leaving and (why := self._find_why_fixed()):
            raise RuntimeError(f"the node of an engine is gone, and the job cannot go on without it: {why}")
        await asyncio.gather(*map(self._remove, leaving))
        self._lacks = ""
        end = time.monotonic() + ROOM_SECONDS  # not for long, since a whole node may be gone
        while gone and new > 0 and time.monotonic() < end and _find_lacking(gone[0].gpus_per_replica_node):
            await asyncio.sleep(0.1)
        starts = [self._start() for _ in range(new)] + [self._restart(one) for one in dead if one not in leaving]
        await asyncio.gather(*starts)
        self._deaths += sum(replica in dead or replica in gone for replica in leaving)
        self._start_seconds += time.monotonic() - begun if starts else 0.0
        if not self.replicas:
            raise RuntimeError(f"no engine is left: the nodes of all are gone, and {self._lacks}")
        if self._count:
            await self._count.report.remote(len(self.replicas), self._lacks)

    async def _list_gone(self) -> list[RolloutReplica]:
        """Replicas with GPUs of their own in whose place nothing can be started, or can get weights, any more.

        Others than dead engines are asked only where there may be others in their place.
        """
        replicas = self.list_dead() if self._count is None or self._find_why_fixed() else self.replicas
        lost = await asyncio.gather(*map(_has_lost_workers, replicas))
        return [replica for replica, is_gone in zip(replicas, lost, strict=True) if is_gone]

    def _find_why_fixed(self) -> str:
        """Why the number of engines cannot change; empty: it can."""
        option, name = "rebuild_group", self.backend
        if option not in inspect.signature(self.backend_cls).parameters:
            return ""
        if (self.config.engine_kwargs.get(name) or {}).get(option):
            return ""
        return (
            f"rollout.checkpoint_engine.engine_kwargs.{name}.{option} is not set, must be true: the group of processes "
            "that send and get weights is made once"
        )

    async def _start(self) -> None:
        """Start one more engine, if Ray has room for it."""
        servers, begun = self._servers, time.monotonic()
        number, config = self._last_number + 1, servers.rollout_config
        replica = servers.rollout_replica_class(
            replica_rank=number, config=config, model_config=servers.model_config, gpus_per_node=config.n_gpus_per_node
        )
        try:
            if lacks := _find_lacking(replica.gpus_per_replica_node):
                raise ValueError(lacks)
            self._last_number = number
            await replica.init_standalone()
        except (RayError, ValueError) as error:
            self._lacks = f"one more engine did not start: {_format_cause(error)}"
            job_log.warning("%s; the next update tries again", self._lacks)
            return _release(replica)
        self._watch(replica)
        self.replicas.append(replica)
        servers.server_handles.append(replica.server_handle)
        servers.server_addresses.append(replica.server_address)
        self._new.append(replica)
        job_log.warning(
            "engine %d was started in %.1f s; it gets the present weights", number, time.monotonic() - begun
        )

    async def _remove(self, replica: RolloutReplica) -> None:
        """Have an engine leave; what it still has goes on elsewhere."""
        place = self._servers.server_handles.index(replica.server_handle)
        del self._servers.server_handles[place], self._servers.server_addresses[place]
        self.replicas.remove(replica)
        self._new = [one for one in self._new if one is not replica]
        del self._lives[replica.replica_rank]
        await self._balancer.remove_servers.remote([replica.server_address])
        try:
            await replica.abort_all_requests(reject_request=True)
            self._leaving.append(replica)
        except RayActorError:
            _release(replica)
        job_log.warning("engine %d has left, %d remain", replica.replica_rank, len(self.replicas))

    @auto_await
    async def leave_round(self, number: int) -> None:
        """Have an engine sleep before the others, until the next update; what it has goes on elsewhere.

        Args:
            number: its place among the replicas.
        """
        replica = self.replicas[number]
        await self._balancer.remove_servers.remote([replica.server_address])
        with suppress(RayActorError):
            await replica.abort_all_requests(reject_request=True)
            await replica.sleep()
        self._asleep.append(replica)
        self._new.append(replica)

    def start_dead(self) -> None:
        """Begin to start new engines for the dead ones, while the others generate; not while a trainer has the GPUs."""
        if self._have_gpus:
            for replica in self.list_dead():
                if replica.replica_rank not in self._starts:
                    self._starts[replica.replica_rank] = self._threads.submit(asyncio.run, _launch(replica))

    async def _take_started(self) -> None:
        """Have engines that :meth:`start_dead` began to start take the places of the dead ones."""
        begun = time.monotonic()
        starts, self._starts = self._starts, {}
        for replica in self.replicas:
            if (start := starts.get(replica.replica_rank)) is not None:
                try:
                    await self._replace(replica, await asyncio.wrap_future(start))
                except RayError as error:
                    job_log.warning("engine %d did not start: %s", replica.replica_rank, _format_cause(error))
        self._start_seconds += time.monotonic() - begun if starts else 0.0

    async def _restart(self, replica: RolloutReplica) -> None:
        """Start a new engine in the place of a dead one."""
        try:
            await self._replace(replica, await _launch(replica))
        except RayError as error:
            raise RuntimeError(
                f"engine {replica.replica_rank} has died, and a new one did not start: {_format_cause(error)}"
            ) from None

    async def _replace(self, dead: RolloutReplica, new: RolloutReplica) -> None:
        """Put a new engine in the place of a dead one; it is as the others are: asleep, if they are."""
        await self._balancer.remove_servers.remote([dead.server_address])  # if no request has found it dead
        place = self._servers.server_handles.index(dead.server_handle)
        dead.servers, dead._server_handle, dead._server_address = new.servers, new.server_handle, new.server_address
        self._servers.server_handles[place] = dead.server_handle
        self._servers.server_addresses[place] = dead.server_address
        self._watch(dead)
        self._new.append(dead)
        self._deaths += 1
        if dead.rollout_mode == RolloutMode.HYBRID:
            with suppress(RayActorError):  # it has died, too
                await dead.sleep()

    # -- what verl asks of all replicas ----------------------------------------------------------------

    @auto_await
    async def sleep_replicas(self) -> None:
        self._have_gpus = False
        await self._ask_living("sleep")
        await self._take_started()

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
        calls = [getattr(replica, method)(*args) for replica in self.replicas if replica not in self._asleep]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, RayActorError):
                raise result


def ask_each(actors: Iterable[ActorHandle], method: str, *args: Any) -> list[Any]:
    """What each actor answers to ``method``; None: it is dead, or died meanwhile."""
    return gather([getattr(actor, method).remote(*args) for actor in actors])


def gather(calls: Iterable[ray.ObjectRef]) -> list[Any]:
    """What calls of actors answer; None: the actor is dead, or died meanwhile."""
    answers: list[Any] = []
    for call in calls:
        try:
            answers.append(ray.get(call))
        except RayActorError:
            answers.append(None)
    return answers


def name_server(replica: int, node: int, suffix: str = "") -> str:
    """Name that verl gives the actor of a replica on one of its nodes."""
    return f"sglang_server_{replica}_{node}{suffix}"


def find_actor(name: str) -> ActorHandle | None:
    """The actor of this name that lives, as far as Ray knows."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def check_some_live(fleets: Sequence[Fleet]) -> None:
    """Raise RuntimeError if all engines have died: verl would train on what had ended before, without what was left."""
    if fleets and not any(fleet.count_living() for fleet in fleets):
        raise RuntimeError(
            "no engine is left: all have died in this step, and some of its responses are missing; their lines in the "
            "log, or in Ray's logs of their actors, say why.  The job may go on from its last checkpoint"
        )


async def _launch(replica: RolloutReplica) -> RolloutReplica:
    """A new engine for the place of a dead one, where that was."""
    number, begun = replica.replica_rank, time.monotonic()
    job_log.warning("engine %d has died: a new one is started", number)
    await _free_names(replica)
    new = copy(replica)
    new.servers = []
    await new.launch_servers()
    job_log.warning(
        "engine %d was started anew in %.1f s; it gets the weights of the next update", number, time.monotonic() - begun
    )
    return new


async def _free_names(replica: RolloutReplica) -> None:
    """Have Ray forget the names of a replica's dead actors: it would refuse new ones of the same names."""
    names = [name_server(replica.replica_rank, node, replica.name_suffix) for node in range(replica.nnodes)]
    for actor in replica.servers:
        ray.kill(actor)  # SGLang's servers of a replica's other nodes are of no use alone
    end = time.monotonic() + NAME_SECONDS
    while time.monotonic() < end and any(map(find_actor, names)):
        await asyncio.sleep(0.1)


def _format_cause(error: Exception) -> str:
    """What an error says; one in an actor without Ray's trace."""
    return format_one_line(getattr(error, "cause", None) or error)


async def _has_lost_workers(replica: RolloutReplica) -> bool:
    """Whether the workers that hold an engine's own GPUs, and get its weights, have died."""
    if replica.rollout_mode != RolloutMode.STANDALONE:
        return False
    try:
        await asyncio.gather(*(worker.__ray_ready__.remote() for worker in replica.workers))
    except RayActorError:
        return True
    return False


def _find_lacking(gpus: int) -> str:
    """What Ray lacks for one more engine on a node; empty: nothing.  verl would wait for it without end."""
    name, colocated = get_platform().ray_resource_name(), 2  # CPUs for each GPU, as verl's replica wants them
    rooms = ray._private.state.available_resources_per_node().values()
    if any(room.get(name, 0) >= gpus and room.get("CPU", 0) >= colocated * gpus for room in rooms):
        return ""
    free = ", ".join(f"{room.get(name, 0):g} and {room.get('CPU', 0):g}" for room in rooms)
    return f"it needs {gpus} {name} and {colocated * gpus} CPU of one node, free on each are {free}"


def _release(replica: RolloutReplica) -> None:
    """Give an engine's actors and GPUs back."""
    for actor in (*replica.servers, *replica.workers):
        ray.kill(actor)
    for group in (replica.resource_pool and replica.resource_pool.pgs) or ():
        remove_placement_group(group)
