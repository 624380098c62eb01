"""SGLang's TokenizerManager, which keeps the state of a request for as long as somebody waits for it, or a rank has it.

SGLang itself forgets a request with the output that ends it.  Many have none: those that are refused before they go to
a rank, those that are aborted while they wait, and the ones that it copies n responses from.  Partial rollouts abort
thousands in each step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

from sglang_pat.sglang.rank import degrees


class ForgettingTokenizerManager(TokenizerManager):
    """Knows of each request whether a rank has it, and whether somebody waits for it."""

    def pat_note_sent(self, tokenized: list[Any]) -> None:
        """These requests go to a rank."""
        for one in tokenized:
            if (state := self.rid_to_state.get(one.rid)) is not None:
                state.pat_sent = True

    def pat_sent(self, obj: GenerateReqInput | EmbeddingReqInput) -> bool:
        """Whether a request of ``obj`` went to a rank."""
        return any(state.pat_sent for state in self._pat_states(obj))

    def pat_running(self) -> int:
        """Requests that a rank has, as far as is known here."""
        return sum(getattr(state, "pat_sent", False) and not state.finished for state in self.rid_to_state.values())

    def pat_forget_unsent(self, obj: GenerateReqInput | EmbeddingReqInput) -> None:
        """Nobody waits any more for those that went to no rank."""
        for state in list(self._pat_states(obj)):
            if not state.pat_sent:
                del self.rid_to_state[state.pat_rid]

    def _pat_states(self, obj: GenerateReqInput | EmbeddingReqInput) -> Iterator[Any]:
        """SGLang's states of ``obj``'s requests, under the ids that came with them."""
        parts = vars(obj).get("_sub_obj_cache", {})
        for i, rid in enumerate(obj.rid if isinstance(obj.rid, list) else [obj.rid]):
            state = self.rid_to_state.get(rid) if isinstance(rid, str) else None
            if state is not None and (state.obj is obj or state.obj is parts.get(i)):
                state.pat_rid, state.pat_sent = rid, getattr(state, "pat_sent", False)
                yield state

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        for rid, told in zip(recv_obj.rids, degrees.told(recv_obj), strict=False):
            if (state := self.rid_to_state.get(rid)) is not None:
                state.pat_degrees = told
        await super()._handle_batch_output(recv_obj)

    def _handle_abort_req(self, recv_obj: AbortReq) -> None:
        """Of a request that waits, maybe with tokens: of a switch that left it no place, or retracted."""
        state = self.rid_to_state.get(recv_obj.rid)
        if state is None:
            return  # SGLang expects that whoever asked still waits
        super()._handle_abort_req(recv_obj)
        if state.out_list:  # none for a health check
            state.out_list[-1]["meta_info"][degrees.KEY] = getattr(state, "pat_degrees", ())
        if getattr(state, "pat_left", False):
            del self.rid_to_state[recv_obj.rid]

    def _wait_one_response(self, obj, request=None) -> AsyncIterator[Any]:
        """SGLang's, which finds a request that ends before anybody begins to wait.

        SGLang sends all parts of a batch first, and waits for them then.  A short response comes back in between,
        and SGLang would look in vain for its state.
        """
        return self._pat_wait(self.rid_to_state[obj.rid], obj, request)

    async def _pat_wait(self, state: ReqState, obj: Any, request: Any) -> AsyncIterator[Any]:
        """Forgets one that was aborted while it waited, too."""
        self.rid_to_state.setdefault(obj.rid, state)
        try:
            async with aclosing(super()._wait_one_response(obj, request)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            state.pat_left = True
            if state.finished and self.rid_to_state.get(obj.rid) is state:
                del self.rid_to_state[obj.rid]
