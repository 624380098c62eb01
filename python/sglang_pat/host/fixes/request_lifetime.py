"""SGLang's TokenizerManager, which keeps the state of a request for as long as somebody waits for it, or a rank has it.

SGLang itself forgets a request with the output that ends it.  Many have none: those that are refused before they go to
a rank, those that are aborted while they wait, and the ones that it copies n responses from.  Partial rollouts abort
thousands in each step.  And a request whose caller leaves goes on in SGLang, or some of its parts do.  One that no rank
has yet cannot be aborted there.

Upstream: https://github.com/sgl-project/sglang/pull/28694 (refused requests),
https://github.com/sgl-project/sglang/pull/24070 (those that are aborted while they wait),
https://github.com/sgl-project/sglang/issues/21173 (an abort that comes too late),
https://github.com/sgl-project/sglang/issues/36333 (clients that leave), ``docs/upstream/abort_at_the_gate.md``,
``docs/upstream/abort_by_prefix.md``
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import BackgroundTasks
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import ReqState

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.rank import degrees

if TYPE_CHECKING:
    from sglang_pat.host.v0_5_12.tokenizer import StockTokenizerManager
else:
    StockTokenizerManager = adapter.tokenizer.StockTokenizerManager

LEFT_SECONDS = 60.0
"""Longest wait for the end of requests that nobody waits for any more."""


class Waiters:
    """Coroutines that wait until something is true.  What they then do before they suspend again, nobody disturbs."""

    def __init__(self) -> None:
        self._waiting: dict[Any, tuple[asyncio.Future, Callable[[], bool]]] = {}

    async def wait_until(self, true: Callable[[], bool], key: Any = None) -> None:
        """Wait until ``true()`` holds; :meth:`check` asks it again, of all waiters or of this ``key``."""
        key = object() if key is None else key
        while not true():
            future = asyncio.get_running_loop().create_future()
            self._waiting[key] = future, true
            try:
                await future
            finally:
                del self._waiting[key]

    def check(self, *keys: Any) -> None:
        """Ask all waiters again, or those of ``keys`` only: something has changed."""
        for key in keys or list(self._waiting):
            future, true = self._waiting.get(key, (None, bool))
            if future is not None and not future.done() and true():
                future.set_result(None)


class TrackingTokenizerManager(StockTokenizerManager):
    """A manager that knows whether a request may go to a rank, whether one has it, and whether somebody waits for it.

    A *call* of ``generate_request`` (``host/tokenizer.py``) has one request (*part*) for each prompt and each of its n
    responses.  Of each part's state ``pat_inside`` says that its call has passed the gate
    (:mod:`~sglang_pat.host.fixes.pauses`), ``pat_sent`` that a rank has it, ``pat_left`` that nobody waits for it any
    more: it is being aborted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pat_init_states()

    def pat_init_states(self) -> None:
        """Make the state in which nobody has called yet."""
        self._pat_numbers = itertools.count()
        self._pat_parts: dict[int, dict[str, ReqState]] = {}
        """States of the parts of each call, by their ids, also of those that SGLang has forgotten."""
        self._pat_inside: set[int] = set()
        self._pat_waiters = Waiters()
        """Waiters for the end of requests."""
        self._pat_named: dict[str, dict[str, ReqState]] = {}
        """Parts by a name that a client has for them and that is none of their ids: its id of a whole call, or of a
        prompt with n responses."""

    def pat_list_active(self) -> Iterator[ReqState]:
        """Parts that have passed the gate and are not known to have ended."""
        return (state for state in self.rid_to_state.values() if state.pat_inside and not state.finished)

    def pat_list_running(self) -> list[ReqState]:
        """Active parts but for health probes, which nobody ends."""
        return [state for state in self.pat_list_active() if not state.obj.rid.startswith(HEALTH_CHECK_RID_PREFIX)]

    def pat_record_request_end(self, *calls: int) -> None:
        """Note that parts have ended, of ``calls`` if they may not have passed the gate."""
        self._pat_waiters.check()

    async def pat_end_running(self) -> int:
        """Abort what ranks have, and wait until it has ended; returns the number of requests.

        Raises:
            RuntimeError: some have not ended after a minute.
        """
        running = self.pat_list_running()
        for state in running:
            state.pat_left = True
            self.abort_request(state.obj.rid)
        await self.pat_wait_for_remaining_requests()
        return len(running)

    async def pat_wait_for_remaining_requests(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end of aborted parts, which a rank still has for a step after their abort.

        Raises:
            RuntimeError: some have not ended after a minute.
        """

        def left() -> int:
            return sum(state.pat_left for state in self.pat_list_running())

        try:
            await asyncio.wait_for(self._pat_waiters.wait_until(lambda: unless() or not left()), LEFT_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"{left()} requests were aborted, and have not ended for {LEFT_SECONDS:.0f} s") from None

    def pat_begin_call(self, obj: Any) -> None:
        """Note that somebody waits for ``obj``, until :meth:`pat_end_call`."""
        number = obj.pat_number = next(self._pat_numbers)
        obj.pat_sent = False
        obj.pat_given = obj.rid if isinstance(obj.rid, str) else ""
        self._pat_parts[number] = {}

    def pat_end_call(self, obj: Any) -> None:
        """End all that is left of ``obj``.  ``obj.pat_sent`` says then whether a rank had any of it."""
        self.pat_drop_spare(obj)
        parts = self._pat_parts.pop(obj.pat_number)
        self._pat_inside.discard(obj.pat_number)
        obj.pat_sent = any(state.pat_sent for state in parts.values())
        for rid, state in parts.items():
            self._pat_drop_request(rid, state)
            for name in state.obj.pat_names:
                named = self._pat_named.get(name, {})
                named.pop(rid, None)
                if not named:
                    self._pat_named.pop(name, None)
        self.pat_record_request_end()

    def _pat_drop_request(self, rid: str, state: ReqState) -> None:
        """Drop a part that nobody waits for any more."""
        if self.rid_to_state.get(rid) is not state:
            return  # it has ended
        if state.pat_sent and not state.finished:
            state.pat_left = True
            self.abort_request(rid)
        else:
            del self.rid_to_state[rid]

    @contextmanager
    def pat_register_parts(self, obj: Any) -> Iterator[None]:
        """Register the parts of ``obj``, whose states SGLang makes inside the block."""
        rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
        before = [self.rid_to_state.get(rid) for rid in rids]
        spare: list[str] = []
        try:
            yield
        finally:  # SGLang may refuse a batch in its middle
            for i, (rid, earlier) in enumerate(zip(rids, before, strict=True)):
                state = self.rid_to_state.get(rid)
                if state is not None and state is not earlier:
                    if i >= getattr(obj, "batch_size", 1):
                        spare.append(rid)
                    else:
                        self._pat_register_segment(rid, state, obj)
            obj.pat_spare = spare

    def pat_drop_spare(self, obj: Any) -> None:
        """Drop n - 1 of n states that SGLang has made of ``obj``: it makes others when it copies the prompt, and looks
        at these before anybody else runs only."""
        for rid in vars(obj).pop("pat_spare", ()):
            self.rid_to_state.pop(rid, None)

    def _pat_register_segment(self, rid: str, state: ReqState, obj: Any) -> None:
        """Register a part of ``obj``, or a copy of a part: for n > 1 its prompt, then each response."""
        copied = getattr(obj, "pat_names", ())
        client_rid, prompt = state.obj.pat_names = copied or (obj.pat_given, rid)
        number = state.obj.pat_number = obj.pat_number
        state.pat_sent = state.pat_left = False
        state.pat_inside = number in self._pat_inside
        self._pat_parts[number][rid] = state
        for name in {client_rid, prompt} - {rid, ""}:
            self._pat_named.setdefault(name, {})[rid] = state
        if copied and (origin := self._pat_parts[number].get(prompt)) is not None and origin.finished:
            self._pat_end_unsent([state])

    # -- to the ranks, or not ---------------------------------------------------------------------

    def pat_may_send(self, tokenized: Any) -> bool:
        """Whether a request goes to a rank now: it was not aborted before."""
        state = self.rid_to_state.get(tokenized.rid)
        if state is not None:
            state.pat_sent = not state.finished
        return state is None or state.pat_sent

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort as SGLang does; what no rank has yet is answered here, and is never sent.

        ``rid``: id of a request, or the one that a client gave for several, which have ids of their own.
        """
        if abort_all:
            self._pat_end_unsent([*self.rid_to_state.values()])
            return super().abort_request(abort_all=True)
        named = self._pat_named.get(rid, {})
        for one, state in [(rid, self.rid_to_state.get(rid)), *named.items()]:
            if state is not None and state.pat_sent:
                super().abort_request(one)
            elif state is not None:
                self._pat_end_unsent([state])

    def pat_abort_inside(self) -> None:
        """Abort all that has passed the gate: not what waits there for new weights, or for the end of a pause."""
        self._pat_end_unsent([*self.pat_list_active()])
        super().abort_request(abort_all=True)

    def _pat_end_unsent(self, states: Iterable[ReqState]) -> None:
        for state in states:
            if state.pat_sent or state.finished:
                continue
            if self.rid_to_state.get(state.obj.rid) is state:
                self._handle_abort_req(AbortReq(rid=state.obj.rid))
            else:  # a prompt that SGLang has copied: the copies to come are aborted, too
                assign(state, finished=True)

    def create_abort_task(self, obj: Any) -> BackgroundTasks:
        """Make no task: SGLang's would abort the ids of a stream two seconds after its end, whoever has them then.

        Here what is left of a call ends with it.
        """
        return BackgroundTasks()

    # -- from the ranks ---------------------------------------------------------------------------

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """Handle the abort of a request that waits and has no tokens."""
        rid: Any = recv_obj.rid
        state = self.rid_to_state.get(rid)
        if state is None:
            return  # SGLang expects that whoever asked still waits
        super()._handle_abort_req(recv_obj)
        if state.out_list:  # none for a health check
            state.out_list[-1]["meta_info"][degrees.KEY] = ()
        # SGLang has no other output for one that was sent; one that was not is known until its call ends.
        if state.pat_sent:
            self.rid_to_state.pop(rid, None)
        else:
            self.rid_to_state[rid] = state
        self.pat_record_request_end(state.obj.pat_number)
