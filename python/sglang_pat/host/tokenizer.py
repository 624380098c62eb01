"""SGLang's TokenizerManager with a line to the coordinator."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.utils import TypeBasedDispatcher

from sglang_pat import messages
from sglang_pat.host.channels import AsyncOrderedReceiver
from sglang_pat.host.rollout import Rollouts
from sglang_pat.metrics import RolloutMetrics


class ReconfigureError(RuntimeError):
    """A reconfiguration that did not happen; ``code`` is 400, 409 or 500 as over HTTP."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class AdaptiveTokenizerManager(TokenizerManager):
    """Adds :meth:`pat_status`, :meth:`pat_reconfigure`, :meth:`pat_trace` and :meth:`pat_inject_prefixes`.

    Attributes:
        pat_weight_updates: number of weight updates so far.
        pat_rollouts: rounds of training jobs.
    """

    def __init__(self, server_args, port_args) -> None:
        super().__init__(server_args, port_args)
        self._pat_ids = itertools.count()
        self._pat_waiting: dict[int, asyncio.Future] = {}
        self.pat_weight_updates = 0
        folder = server_args.pat_rollout_dir
        metrics = RolloutMetrics() if server_args.enable_metrics else None
        self.pat_rollouts = Rollouts(self, Path(folder) if folder else None, metrics)
        self._result_dispatcher += TypeBasedDispatcher(
            [
                (messages.StatusReply, self._pat_reply),
                (messages.ReconfigureReply, self._pat_reply),
                (messages.TraceReply, self._pat_reply),
            ]
        )

    async def update_weights_from_disk(self, obj, request=None):
        with self._pat_update():
            return await super().update_weights_from_disk(obj, request)

    async def update_weights_from_tensor(self, obj, request=None):
        with self._pat_update():
            return await super().update_weights_from_tensor(obj, request)

    async def update_weights_from_distributed(self, obj, request=None):
        with self._pat_update():
            return await super().update_weights_from_distributed(obj, request)

    async def update_weights_from_ipc(self, obj, request=None):
        with self._pat_update():
            return await super().update_weights_from_ipc(obj, request)

    @contextmanager
    def _pat_update(self) -> Iterator[None]:
        try:
            yield
        finally:
            # Also one that failed: some ranks may have begun.
            self.pat_weight_updates += 1
            self.pat_rollouts.weights_changed()

    def init_ipc_channels(self, port_args) -> None:
        super().init_ipc_channels(port_args)
        self.recv_from_detokenizer = AsyncOrderedReceiver(self.recv_from_detokenizer)

    def _pat_reply(self, reply: Any) -> None:
        future = self._pat_waiting.pop(reply.query_id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _pat_ask(self, kind: type, **fields: Any) -> Any:
        self.auto_create_handle_loop()
        query_id = next(self._pat_ids)
        future = self._pat_waiting[query_id] = asyncio.get_running_loop().create_future()
        self.send_to_scheduler.send_pyobj(kind(query_id=query_id, **fields))
        return await future

    async def pat_status(self) -> dict[str, Any]:
        """Layout, candidates, load of each group, switches so far, weight version."""
        reply = await self._pat_ask(messages.StatusQuery)
        return reply.status | {"weight_version": self.server_args.weight_version}

    async def pat_reconfigure(self, tp: int) -> dict[str, Any]:
        """Switch to degree ``tp``; returns the switch record (empty if already there).

        Raises:
            ReconfigureError: not a candidate (400), a switch is under way (409), aborted (500).
        """
        reply = await self._pat_ask(messages.Reconfigure, tp=tp)
        if reply.code != 200:
            raise ReconfigureError(reply.code, reply.message)
        return reply.record or {}

    async def pat_trace(self) -> list[dict[str, Any]]:
        """Steps of all replicas since the last call (``sglang_pat.messages.Step``), oldest first; bounded."""
        return (await self._pat_ask(messages.TraceQuery)).steps

    def pat_floor(self, tp: int) -> None:
        """Requests sent from now on run in degree ``tp`` at least; 0: in whatever the policy chooses."""
        self.auto_create_handle_loop()
        self.send_to_scheduler.send_pyobj(messages.Floor(tp=tp))

    def pat_inject_prefixes(self, prompts: list[list[int]]) -> None:
        """Requests sent afterwards find ``prompts`` (token ids) in the radix cache of every replica."""
        self.auto_create_handle_loop()
        self.send_to_scheduler.send_pyobj(messages.InjectPrefixes(prompts=prompts))


def init_adaptive_tokenizer_manager(server_args, port_args):
    """The host's ``init_tokenizer_manager`` with our class."""
    return init_tokenizer_manager(server_args, port_args, AdaptiveTokenizerManager)
