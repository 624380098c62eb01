"""SGLang's TokenizerManager with a line to the coordinator, for what clients ask of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec

from sglang_pat import messages
from sglang_pat.coordinator import schedule
from sglang_pat.host.tokenizer import RoutedTokenizerManager
from sglang_pat.policies.lending import Training
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.server.calibration import calibrate

if TYPE_CHECKING:
    from sglang_pat.host.arguments import AdaptiveServerArgs

POLL_SECONDS, IDLE_SECONDS = 0.005, 60.0
"""Seconds between two looks whether the engine is empty, and the longest wait for it once all requests are answered."""


class ReconfigureError(RuntimeError):
    """A reconfiguration that did not happen; ``code`` is 400, 409 or 500 as over HTTP."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class AdaptiveTokenizerManager(RoutedTokenizerManager):
    """SGLang's TokenizerManager, with the ``pat_`` methods for what clients ask of the coordinator.

    Attributes:
        pat_rounds: rounds that this process drives, to be cancelled when weights are updated.
        pat_log_begins: whether requests count in the decision log from the next one on.
    """

    server_args: AdaptiveServerArgs
    send_to_scheduler: Any

    def __init__(self, server_args, port_args) -> None:
        super().__init__(server_args, port_args)
        self._pat_ids = itertools.count()
        self._pat_waiting: dict[int, asyncio.Future] = {}
        config = server_args.spec.config
        self.pat_log_begins = config.log is not None
        self._pat_calibrates = config.calibrates
        self._pat_calibration: asyncio.Task | None = None
        self.pat_rounds: WeakSet[RolloutRound] = WeakSet()
        self._result_dispatcher._mapping[messages.Reply] = self._pat_reply

    # -- the calibration ----------------------------------------------------------------------------

    def _pat_calibrate(self) -> None:
        """Calibrate.  The first requests wait at the gate for it; it goes on without those that do not."""
        if not self._pat_calibrates or self._pat_calibration is not None:
            return
        self.auto_create_handle_loop()
        self._pat_calibration = asyncio.ensure_future(calibrate(self))
        self._pat_calibration.add_done_callback(lambda _: self._pat_run_calibration())

    def _pat_run_calibration(self) -> None:
        self._pat_calibrates = False
        self._pat_at_gate.check()

    def pat_send_calibration_turn(self, over: bool = False) -> None:
        """Send the coordinator a :class:`~sglang_pat.messages.CalibrationTurn`."""
        self.send_to_scheduler.send_pyobj(messages.CalibrationTurn(over=over))

    # -- weights --------------------------------------------------------------------------------

    @asynccontextmanager
    async def pat_pause_for_update(self, obj: Any) -> AsyncIterator[None]:
        # An update waits until no request is left, unless generation is paused: a round is not to be waited for.
        self._pat_cancel_rounds()
        try:
            async with super().pat_pause_for_update(obj):
                yield
        finally:
            self.pat_weight_updates += 1  # also after one that failed: some ranks may have begun
            self._pat_cancel_rounds()

    def _pat_cancel_rounds(self) -> None:
        for round_ in list(self.pat_rounds):
            round_.cancel_for_new_weights()

    # -- questions to the coordinator ---------------------------------------------------------------

    def _pat_reply(self, reply: messages.Reply) -> None:
        if (future := self._pat_waiting.pop(reply.query_id, None)) is not None and not future.done():
            future.set_result(reply)

    async def _pat_ask(self, kind: type, **fields: Any) -> Any:
        """The coordinator's answer.  Raises ReconfigureError: the coordinator refuses it, or could not do it."""
        self.auto_create_handle_loop()
        query_id = next(self._pat_ids)
        future = self._pat_waiting[query_id] = asyncio.get_running_loop().create_future()
        self.send_to_scheduler.send_pyobj(kind(query_id=query_id, **fields))
        reply: messages.Reply = await future
        if reply.code != 200:
            raise ReconfigureError(reply.code, reply.message)
        return reply.answer

    async def pat_status(self) -> dict[str, Any]:
        """Layout, candidates, load of each group, switches so far, weight version."""
        status = await self._pat_ask(messages.StatusQuery)
        return status | {"weight_version": self.pat_get_weight_version()}

    async def pat_wait_until_idle(self) -> None:
        """Wait, when all requests are answered, until the coordinator has heard that they have ended: then it has
        heard of their steps, too, and the next batch is spread evenly.

        Raises:
            RuntimeError: it still knows some after a minute.
        """
        begun = time.monotonic()
        while left := (await self.pat_status())["requests"]:
            if time.monotonic() - begun > IDLE_SECONDS:
                raise RuntimeError(f"the engine still has {left} requests {IDLE_SECONDS:.0f} s after all were answered")
            await asyncio.sleep(POLL_SECONDS)

    async def pat_reconfigure(self, tp: int, dry_run: bool = False) -> dict[str, Any]:
        """Reconfigure as ``Engine.reconfigure`` does.

        Raises:
            ReconfigureError: not a candidate (400), a switch is under way (409), aborted (500).
        """
        return await self._pat_ask(messages.Reconfigure, tp=tp, dry_run=dry_run) or {}

    async def pat_lend_ranks(
        self, stride: int, client: str = messages.CLIENT, lease_seconds: float | None = None
    ) -> dict[str, Any]:
        """Lend ranks as ``Engine.lend_ranks`` does; stride 1: take them back as ``Engine.take_back_ranks`` does.

        Without ``lease_seconds`` the lease does not end: the client is this process, with which the engine ends.

        Raises:
            ReconfigureError: not with this stride (400), not now (409), aborted (500).
        """
        return await self._pat_ask(messages.LendRanks, stride=stride, client=client, lease_seconds=lease_seconds) or {}

    async def pat_decide_lending(self, training: Training, client: str = messages.CLIENT) -> dict[str, Any]:
        """Decide as ``Engine.decide_lending`` does, and renew the client's lease."""
        return await self._pat_ask(messages.LendingQuery, training=training, client=client)

    async def pat_get_trace(self) -> list[dict[str, Any]]:
        """Steps of all replicas since the last call (``sglang_pat.messages.Step``), oldest first; bounded."""
        return await self._pat_ask(messages.TraceQuery)

    async def pat_set_schedule(self, entries: list[Any]) -> dict[str, Any]:
        """Replace the schedule, for the requests sent from now on, by entries with the fields of
        :class:`~sglang_pat.messages.ScheduleEntry`; none of them ends it.

        Raises:
            ValueError: no such entries.
            ReconfigureError: the policy is another one (409).
        """
        self._pat_check_schedule()
        checked = schedule.check(entries, self.server_args.spec.config)
        self.pat_log_begins = False
        return msgspec.to_builtins(await self._pat_ask(messages.SetSchedule, entries=checked))

    async def pat_get_schedule(self) -> dict[str, Any]:
        """Record of how the schedule went, when it is over or replaced (fields of
        :class:`~sglang_pat.messages.ScheduleState`).

        Raises as :meth:`pat_set_schedule`.
        """
        self._pat_check_schedule()
        return msgspec.to_builtins(await self._pat_ask(messages.ScheduleQuery))

    def _pat_check_schedule(self) -> None:
        if self.server_args.spec.config.policy != "schedule":
            raise ReconfigureError(409, "this engine does not follow a schedule: start it with --pat-policy schedule")

    def _pat_begin_log(self) -> None:
        if self.pat_log_begins:
            self.pat_log_begins = False
            self.auto_create_handle_loop()
            self.send_to_scheduler.send_pyobj(messages.SetSchedule(query_id=next(self._pat_ids), entries=[]))

    def pat_send_round(self, message: messages.BeginRound | messages.EndRound) -> None:
        """Tell the coordinator that a round of the requests sent from now on begins, or ends."""
        self.auto_create_handle_loop()
        self.send_to_scheduler.send_pyobj(message)

    def pat_inject_prefixes(self, prompts: list[list[int]]) -> None:
        """Have requests sent afterwards find ``prompts`` (token ids) in the radix cache of every replica."""
        self.auto_create_handle_loop()
        self.send_to_scheduler.send_pyobj(messages.InjectPrefixes(prompts=prompts))
