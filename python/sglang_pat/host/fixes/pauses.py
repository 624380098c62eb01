"""Order of what comes in a pause, while memory is released, or beside an update of the weights.

Requests wait at a *gate* before they go to the ranks.  SGLang has a condition and a lock of its own there.  With them
an abort does not reach who waits, an update and a pause wait for each other, and of several updates one is answered.
``docs/pauses.md`` has a table of what happens, which ``tests/contract/test_pausing.py`` holds.

Upstream: https://github.com/sgl-project/sglang/issues/25319 and ``docs/upstream/update_and_pause.md``,
``docs/upstream/abort_at_the_gate.md``, ``docs/upstream/health_in_a_pause.md``
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqOutput,
    UpdateWeightFromDiskReqInput,
)

from sglang_pat.host.controls import get_error
from sglang_pat.host.fixes.request_lifetime import TrackingTokenizerManager, Waiters
from sglang_pat.host.fixes.weight_updates import NOT_FLUSHED

AGAIN_SECONDS = 1.0
"""Time after which a pause that aborts does so again, as SGLang's does."""
FLUSH_SECONDS = 0.1
"""Time between two flushes, of which the first failed though nothing ran."""


class Gate:
    """Stand-in for SGLang's ``is_pause_cond`` and for its ``model_update_lock``, for which nobody waits then.

    Args:
        enter: waits until the request that asks may pass.
        opened: called when generation goes on.
    """

    reader_lock = writer_lock = nullcontext()

    def __init__(self, enter: Callable[[], Awaitable[None]], opened: Callable[[], None]) -> None:
        self._enter, self.notify_all = enter, opened

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait at the gate; only SGLang's ``generate_request`` calls this."""
        await self._enter()


class PausingTokenizerManager(TrackingTokenizerManager):
    """A manager with a gate, which is shut in a pause, while memory is released, and for an update of the weights."""

    def pat_init_states(self) -> None:
        super().pat_init_states()
        self._pat_at_gate = Waiters()
        """Calls that wait at the gate, by number."""
        self._pat_stopped = ""
        """The mode of the pause in which ranks make no step, while there is one."""
        self._pat_released: set[str] = set()
        self._pat_updates = 0
        """Number of updates of the weights that are under way, or wait."""
        self._pat_order, self._pat_updating, self._pat_memory = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        """Locks of pauses and their ends, of updates, and of releases and resumes: each waits for those before it."""
        self._pat_asking: asyncio.Task | None = None

    # -- the gate ---------------------------------------------------------------------------------

    def _pat_is_gate_closed(self) -> bool:
        return bool(self.is_pause or self._pat_released or self._pat_updates)

    def pat_record_request_end(self, *calls: int) -> None:
        super().pat_record_request_end()
        if calls:
            self._pat_at_gate.check(*calls)

    # -- probes -----------------------------------------------------------------------------------

    def pat_should_block_probe(self, obj: Any) -> bool:
        """Whether ``obj`` is a health probe that no rank would get now."""
        return self._pat_is_gate_closed() and isinstance(obj.rid, str) and obj.rid.startswith(HEALTH_CHECK_RID_PREFIX)

    def pat_ask_ranks(self) -> asyncio.Future:
        """Have all leaders answer, also in a pause: whoever probes looks whether anything has come from them."""
        if self._pat_asking is None or self._pat_asking.done():
            self._pat_asking = asyncio.ensure_future(self.get_internal_state())
        return asyncio.shield(self._pat_asking)

    # -- pauses -----------------------------------------------------------------------------------

    async def pause_generation(self, obj) -> None:
        """Pause.  In the mode ``abort`` ranks go on, so that what is aborted ends, also after another pause."""
        async with self._pat_order:
            self.is_pause = True
            if any(rid.startswith(HEALTH_CHECK_RID_PREFIX) for rid in self.rid_to_state):
                self.pat_ask_ranks()
            if obj.mode == "abort":
                self.pat_abort_inside()
                if self._pat_stopped:
                    self._pat_stopped = ""
                    self.send_to_scheduler.send_pyobj(ContinueGenerationReqInput())
                await self._pat_wait_until_empty()
            else:
                self.send_to_scheduler.send_pyobj(obj)
                self._pat_stopped = obj.mode
                self._pat_waiters.check()

    async def _pat_wait_until_empty(self) -> None:
        def nothing() -> bool:
            return not self._pat_updates and not any(self.pat_list_active())

        while not nothing():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._pat_waiters.wait_until(nothing), AGAIN_SECONDS)
                return
            self.pat_abort_inside()

    async def continue_generation(self, obj) -> None:
        """Continue as SGLang does, once the updates that came in the pause are made."""
        async with self._pat_order:
            if self.is_pause:
                await self._pat_waiters.wait_until(lambda: not self._pat_updates)
            self._pat_stopped = ""
            await super().continue_generation(obj)

    # -- updates of the weights -------------------------------------------------------------------

    @asynccontextmanager
    async def pat_pause_for_update(self, obj: Any) -> AsyncIterator[None]:
        """Run an update inside the block: one after the other, each once nothing runs, or ranks are paused.

        Raises:
            RuntimeError: requests were aborted, and do not end.
        """
        if getattr(obj, "abort_all_requests", False):
            obj.abort_all_requests = False
            self.pat_abort_inside()
        self._pat_updates += 1
        try:
            async with self._pat_updating:
                await self._pat_waiters.wait_until(self._pat_may_update)
                await self.pat_wait_for_remaining_requests(unless=lambda: bool(self._pat_stopped))
                yield
        finally:
            self._pat_updates -= 1
            self._pat_waiters.check()
            self._pat_at_gate.check()

    def _pat_may_update(self) -> bool:
        return bool(self._pat_stopped) or all(state.pat_left for state in self.pat_list_active())

    async def update_weights_from_disk(self, obj, request=None):
        return await self._pat_run_update(super().update_weights_from_disk, obj, request)

    async def update_weights_from_tensor(self, obj, request=None):
        return await self._pat_run_update(super().update_weights_from_tensor, obj, request)

    async def update_weights_from_distributed(self, obj, request=None):
        return await self._pat_run_update(super().update_weights_from_distributed, obj, request)

    async def update_weights_from_ipc(self, obj, request=None):
        return await self._pat_run_update(super().update_weights_from_ipc, obj, request)

    async def _pat_run_update(self, update: Callable[..., Awaitable[Any]], obj: Any, request: Any) -> tuple[Any, ...]:
        """Run SGLang's ``update`` and return its answer: success, message, ….

        Weights that are new have their version, whatever else has failed.
        """
        async with self.pat_pause_for_update(obj):
            success, message, *others = await self.pat_update_in_session(update, obj, request)
            if not success and all(part == NOT_FLUSHED for part in message.split(" | ")):
                if isinstance(obj, UpdateWeightFromDiskReqInput):
                    self._update_model_path_info(obj.model_path, obj.load_format)
                self._update_weight_version_if_provided(obj.weight_version)
            return success, message, *others

    # -- the cache, and memory --------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float | None = None) -> FlushCacheReqOutput:
        """Flush with SGLang's time limit, kept here: on a rank everything that needs its answers would wait for it."""
        clock = asyncio.get_running_loop().time
        end = clock() + (timeout_s or 0.0)
        while timeout_s and clock() < end:
            with suppress(TimeoutError):
                ready = self._pat_waiters.wait_until(
                    lambda: self._pat_stopped == "retract" or not any(self.pat_list_active())
                )
                await asyncio.wait_for(ready, end - clock())
                if (answer := await super().flush_cache()).success:
                    return answer
                await asyncio.sleep(FLUSH_SECONDS)
        if timeout_s:
            return FlushCacheReqOutput(success=False, message="Timed out waiting for idle state.")
        return await super().flush_cache()

    async def release_memory_occupation(self, obj, request=None) -> None:
        """Release memory; SGLang's ranks would assert that they are idle.  Requests wait until all of it is taken back.

        Raises:
            ValueError: requests run; nothing is released.
            RuntimeError: a rank has failed.
        """
        async with self._pat_memory:
            await self._pat_release_memory(obj)

    async def _pat_release_memory(self, obj: Any) -> None:
        if running := sum(not state.pat_left for state in self.pat_list_running()):
            raise ValueError(f"{running} requests run: memory is released once all have ended, or were aborted")
        if self._pat_stopped == "in_place" and (left := len(self.pat_list_running())):
            raise ValueError(f"{left} aborted requests end once generation goes on: continue it, then release memory")
        tags = {*(obj.tags or GPU_MEMORY_ALL_TYPES)} - self._pat_released
        self._pat_released |= tags
        try:
            await self.pat_wait_for_remaining_requests()
            self.auto_create_handle_loop()
            _check_replies(await self.release_memory_occupation_communicator(obj))
        except Exception:
            self._pat_resume_memory(tags)
            raise

    async def resume_memory_occupation(self, obj, request=None) -> None:
        """Take released memory back; raises RuntimeError if a rank has failed."""
        self.auto_create_handle_loop()
        async with self._pat_memory:
            _check_replies(await self.resume_memory_occupation_communicator(obj))
            self._pat_resume_memory({*(obj.tags or GPU_MEMORY_ALL_TYPES)})

    def _pat_resume_memory(self, tags: set[str]) -> None:
        self._pat_released -= tags
        self._pat_at_gate.check()


def _check_replies(replies: list[Any]) -> None:
    if message := next(filter(None, map(get_error, replies)), ""):
        raise RuntimeError(message)
