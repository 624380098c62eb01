"""SGLang's TokenizerManager, which keeps the state of a request for as long as somebody waits for it, or a rank has it.

SGLang itself forgets a request with the output that ends it.  Many have none: those that are refused before they go to
a rank, those that are aborted while they wait, and the ones that it copies n responses from.  Partial rollouts abort
thousands in each step.  And a request whose caller leaves goes on in SGLang, or some of its parts do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.utils.aio_rwlock import RWLock

from sglang_pat.sglang.rank import degrees

POLL_SECONDS, LEFT_SECONDS = 0.005, 60.0
"""Between two looks whether requests that nobody waits for have ended, and the longest wait for it."""
PAUSE_SECONDS = 2.0
"""The longest wait of a pause."""


class ForgettingTokenizerManager(TokenizerManager):
    """Knows of each request whether a rank has it, and whether somebody waits for it.

    A *call* of ``generate_request`` has one request (*part*) for each prompt and each of its n responses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pat_begin()

    def pat_begin(self) -> None:
        """Nobody has called yet."""
        self._pat_numbers = itertools.count()
        self._pat_parts: dict[int, list[tuple[str, ReqState]]] = {}
        self.model_update_lock = UpdateLock(self.pat_until_left_have_ended)

    def pat_running(self) -> list[ReqState]:
        """Requests that a rank has, as far as is known here; health probes, which nobody ends, left out.

        ``pat_left`` of each: nobody waits for it any more, it is being aborted.
        """
        return [
            state
            for rid, state in self.rid_to_state.items()
            if state.pat_sent and not state.finished and not rid.startswith(HEALTH_CHECK_RID_PREFIX)
        ]

    async def pat_end_running(self) -> int:
        """Abort what ranks have, and wait until it has ended; returns the number of requests.

        Raises:
            RuntimeError: some have not ended after a minute.
        """
        running = self.pat_running()
        for state in running:
            state.pat_left = True
            self.abort_request(state.obj.rid)
        await self.pat_until_left_have_ended()
        return len(running)

    async def pat_until_left_have_ended(self, most: float | None = None) -> None:
        """A rank still has them for a step after their abort.

        Raises:
            RuntimeError: some have not ended after ``most`` seconds (a minute).
        """
        begun, most = time.monotonic(), LEFT_SECONDS if most is None else most
        while left := sum(state.pat_left for state in self.pat_running()):
            if time.monotonic() - begun > most:
                raise RuntimeError(f"{left} requests were aborted, and have not ended for {most:.0f} s")
            await asyncio.sleep(POLL_SECONDS)

    async def generate_request(self, obj, request=None) -> AsyncIterator[Any]:
        """SGLang's; at its end nothing of ``obj`` goes on.  ``obj.pat_sent`` says then whether a rank had any of it."""
        number = obj.pat_number = next(self._pat_numbers)
        obj.pat_sent = False
        self._pat_parts[number] = []
        try:
            async with aclosing(super().generate_request(obj, request)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            parts = self._pat_parts.pop(number)
            obj.pat_sent = any(state.pat_sent for _, state in parts)
            for rid, state in parts:
                self._pat_leave(rid, state)

    def _pat_leave(self, rid: str, state: ReqState) -> None:
        """Nobody waits for it any more."""
        if self.rid_to_state.get(rid) is not state:
            return  # it has ended
        if state.pat_sent and not state.finished:
            state.pat_left = True
            self.abort_request(rid)
        else:
            del self.rid_to_state[rid]

    def _init_req_state(self, obj, request=None) -> None:
        number = getattr(obj, "pat_number", None)
        rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
        before = [self.rid_to_state.get(rid) for rid in rids]
        try:
            super()._init_req_state(obj, request)
        finally:  # SGLang may refuse a batch in its middle
            for rid, earlier in zip(rids, before, strict=True):
                state = self.rid_to_state.get(rid)
                if state is not None and state is not earlier:
                    state.pat_sent = state.pat_left = False
                    if number is not None:
                        state.obj.pat_number = number  # copies of it, for n > 1, belong to the same call
                        self._pat_parts[number].append((rid, state))

    def pat_note_sent(self, tokenized: list[Any]) -> None:
        """These requests go to a rank."""
        for one in tokenized:
            if (state := self.rid_to_state.get(one.rid)) is not None:
                state.pat_sent = True

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        for rid, told in itertools.zip_longest(recv_obj.rids, degrees.told(recv_obj), fillvalue=()):
            if (state := self.rid_to_state.get(rid)) is None:
                continue
            if state.finished:
                del self.rid_to_state[rid]  # the word of its abort has overtaken these tokens: SGLang would revive it
            else:
                state.pat_degrees = told
        await super()._handle_batch_output(recv_obj)

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """Of a request that waits and has no tokens."""
        state = self.rid_to_state.get(recv_obj.rid)
        if state is None:
            return  # SGLang expects that whoever asked still waits
        super()._handle_abort_req(recv_obj)
        if state.out_list:  # none for a health check
            state.out_list[-1]["meta_info"][degrees.KEY] = getattr(state, "pat_degrees", ())
        if state.pat_left:
            del self.rid_to_state[recv_obj.rid]

    def _wait_one_response(self, obj, request=None) -> AsyncIterator[Any]:
        """SGLang's, for a request that may have ended before anybody begins to wait.

        SGLang sends all parts of a batch first, and waits for them then.  A short response comes back in between,
        and SGLang would look in vain for its state.
        """
        return self._pat_wait(self.rid_to_state[obj.rid], obj, request)

    async def _pat_wait(self, state: ReqState, obj: Any, request: Any) -> AsyncIterator[Any]:
        try:
            waits: Any = _Knowing(self, {obj.rid: state})
            async with aclosing(TokenizerManager._wait_one_response(waits, obj, request)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            if state.finished and self.rid_to_state.get(obj.rid) is state:
                del self.rid_to_state[obj.rid]  # it was aborted while it waited


class UpdateLock(RWLock):
    """A writer, an update of the weights, also waits for requests that nobody waits for: their ranks must be idle."""

    def __init__(self, until_left_have_ended: Callable[..., Awaitable[None]]) -> None:
        super().__init__()
        self._until_left_have_ended = until_left_have_ended

    async def acquire_writer(self) -> None:
        """Raises RuntimeError: they do not end."""
        await super().acquire_writer()
        try:
            await self._until_left_have_ended()
        except BaseException:
            await self.release_writer()
            raise

    async def is_locked(self) -> bool:
        """What a client's pause asks, until it is false: an update that follows asks nobody."""
        locked = await super().is_locked()
        with suppress(RuntimeError):  # ranks that are paused already make no step
            await self._until_left_have_ended(PAUSE_SECONDS)
        return locked


class _Knowing:
    """A manager that knows of these requests only."""

    def __init__(self, manager: TokenizerManager, rid_to_state: dict[str, ReqState]) -> None:
        self._manager = manager
        self.rid_to_state = rid_to_state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
