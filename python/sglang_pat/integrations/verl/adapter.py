"""The client of an engine in each training process (:class:`SurvivingAdapter`), which outlives the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import torch
from aiohttp import ClientResponseError
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError
from verl.workers.rollout.sglang_rollout import sglang_rollout

from sglang_pat.errors import format_one_line
from sglang_pat.integrations.verl.fleet import find_actor, name_server

logger = logging.getLogger(__name__)

DYING_SECONDS = 10.0
"""Longest from an engine's last answer until Ray knows that its actor is dead."""


class SurvivingAdapter(sglang_rollout.ServerAdapter):
    """verl's client, to which a dead engine of ours is one that takes everything: the trainer's ranks go through their
    weights together, whoever gets them.  The next update finds the engine that was started in its place."""

    server_actor: ActorHandle | None = None

    async def _init_server_adapter(self) -> None:
        name = name_server(self.replica_rank, self.node_rank)
        if isinstance(self._engine, (_Surviving, _Dead)):
            current = find_actor(name)
            if current is not None and current != self.server_actor:
                self._engine = None
        if self._engine is not None:
            return
        try:
            await super()._init_server_adapter()
        except (ActorDiedError, ValueError) as error:  # ValueError: Ray has forgotten the name, too
            if isinstance(error, ValueError) and find_actor(name) is not None:
                raise
            self._engine = _Dead()
            return
        if self._engine is not None and hasattr(self.server_actor, "live"):
            self._engine = _Surviving(self._engine, self.server_actor)

    async def update_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], *args: Any, **named: Any
    ) -> None:
        try:
            await super().update_weights(weights, *args, **named)
        except RayActorError as error:  # the last thing, when all weights are out
            logger.warning("an engine died in an update of its weights: %s", format_one_line(error))


class _Dead:
    """The client of an engine that died before it could be asked for its address."""

    async def flush_cache(self) -> None:
        """End an update, when all weights are out."""
        raise RayActorError

    def __getattr__(self, method: str) -> Any:
        async def skip(*args: Any, **named: Any) -> None:
            pass

        return skip


class _Surviving:
    """verl's HTTP client of ``engine``; once ``actor`` is dead, calls return None."""

    def __init__(self, engine: Any, actor: ActorHandle) -> None:
        self._engine = engine
        self._death = asyncio.ensure_future(_wait_for_death(actor))  # one for all calls: Ray keeps each until then

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)

        async def survive(*args: Any, **named: Any) -> Any:
            call, death = asyncio.ensure_future(method(*args, **named)), self._death
            await asyncio.wait({call, death}, return_when=asyncio.FIRST_COMPLETED)  # verl's client tries for long
            try:
                if call.done() and _may_be_of_death(call.exception()):
                    await asyncio.wait({death}, timeout=DYING_SECONDS)
                if not death.done():
                    return call.result()
                logger.warning("an engine is dead, and gets no weights (%s)", name)
            finally:
                call.cancel()

        return survive


async def _wait_for_death(actor: ActorHandle) -> None:
    with suppress(RayActorError):
        await actor.live.remote()


def _may_be_of_death(error: BaseException | None) -> bool:
    """Whether an engine may have failed as it dies; a refusal is none."""
    return error is not None and not (isinstance(error, ClientResponseError) and error.status < 500)
