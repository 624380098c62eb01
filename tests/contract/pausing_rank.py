"""A rank that behaves like SGLang's, as far as the server can tell, for tests of pauses; no test of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct as io

from sglang_pat.host.controls import make_error_reply

from .tokenizer_world import Manager, Tokenized

REPLIES = {
    io.UpdateWeightFromDiskReqInput: lambda: io.UpdateWeightFromDiskReqOutput(success=True, message=""),
    io.UpdateWeightsFromTensorReqInput: lambda: io.UpdateWeightsFromTensorReqOutput(success=True, message=""),
    io.UpdateWeightsFromDistributedReqInput: lambda: io.UpdateWeightsFromDistributedReqOutput(success=True, message=""),
    io.UpdateWeightsFromIPCReqInput: lambda: io.UpdateWeightsFromIPCReqOutput(success=True, message=""),
}
SESSIONS = {
    getattr(io, f"{name}WeightUpdateReqInput"): getattr(io, f"{name}WeightUpdateReqOutput")
    for name in ("Begin", "End")
    if hasattr(io, f"{name}WeightUpdateReqInput")
}
"""The beginning and the end of a session of updates, where SGLang has them."""
IN_SESSION = (io.UpdateWeightsFromTensorReqInput, io.UpdateWeightsFromDistributedReqInput)


class Rank:
    """Takes what the server sends, in order.  A request decodes, or waits for the end of a pause.

    Attributes:
        aborted: ids of those requests that end with the next step.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager, self._taken, self.replies = manager, 0, dict(REPLIES)
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.aborted: set[str] = set()
        self.paused, self.flushed = "", True
        self.released: set[str] = set()
        self.in_session = False
        self.heard = 0
        """The number of messages that the server has had from this rank."""
        self.news = asyncio.Event()

    def tell(self) -> None:
        """Count a message to the server, and wake who waits for one."""
        self.heard, before, self.news = self.heard + 1, self.news, asyncio.Event()
        before.set()

    @property
    def requests(self) -> list[str]:
        return self.running + self.waiting

    def take(self) -> bool:
        """Handle one message; returns whether there was one."""
        if self._taken == len(self._manager.sent):
            return False
        self._taken += 1
        reply = self._handle(self._manager.sent[self._taken - 1])
        if reply is not None:
            self._manager._result_dispatcher(reply)
            self.tell()
        return True

    def _handle(self, obj: Any) -> Any:
        if isinstance(obj, Tokenized):
            assert not self.released, f"{obj.rid} computes in memory that is released"
            if obj.rid.startswith(HEALTH_CHECK_RID_PREFIX) and self.requests:
                return None  # SGLang's lets the next step answer it
            (self.waiting if self.paused else self.running).append(obj.rid)
        elif isinstance(obj, io.AbortReq):
            self._abort([r for r in self.requests if obj.abort_all or r == obj.rid])
        elif isinstance(obj, io.PauseGenerationReqInput):
            self.paused = obj.mode
            if obj.mode == "retract":
                self.waiting, self.running = self.requests, []
        elif isinstance(obj, io.ContinueGenerationReqInput):
            self.paused, self.running, self.waiting = "", self.requests, []
        elif type(obj) in SESSIONS:
            begins = type(obj).__name__.startswith("Begin")
            assert self.in_session != begins, "sessions do not nest"
            self.in_session = begins
            return SESSIONS[type(obj)](success=True, message="")
        elif type(obj) in self.replies:
            assert self.in_session == isinstance(obj, IN_SESSION) or not SESSIONS, "SGLang refuses it outside a session"
            running = [rid for rid in self.running if not rid.startswith(HEALTH_CHECK_RID_PREFIX)]
            assert self.paused or not running, f"new weights in the middle of {running}"
            return self.replies[type(obj)]()
        elif isinstance(obj, io.FlushCacheReqInput):
            assert not obj.timeout_s
            self.flushed = not self.running
            return io.FlushCacheReqOutput(success=self.flushed)
        elif isinstance(obj, io.ReleaseMemoryOccupationReqInput):
            if self.requests:
                return make_error_reply(obj, RuntimeError("a rank still has a request"))
            self.released.update(obj.tags)
            return io.ReleaseMemoryOccupationReqOutput()
        elif isinstance(obj, io.ResumeMemoryOccupationReqInput):
            if not self.released.issuperset(obj.tags):
                return make_error_reply(obj, KeyError("not released"))
            self.released.difference_update(obj.tags)
            return io.ResumeMemoryOccupationReqOutput()
        else:
            assert isinstance(obj, io.GetInternalStateReq), obj
            return io.GetInternalStateReqOutput(internal_state={})
        return None

    def _abort(self, rids: list[str]) -> None:
        for rid in rids:
            if rid in self.running:
                self.aborted.add(rid)  # it ends with the next step
            else:
                self.waiting.remove(rid)
                self._manager._result_dispatcher(io.AbortReq(rid=rid))
                self.tell()

    async def step(self, ends: int) -> None:
        """Make a token of each request; this one of them ends, and the aborted ones."""
        if self.paused or not self.running:
            return
        ends %= len(self.running)
        for i, rid in enumerate(list(self.running)):
            reason = "abort" if rid in self.aborted else "length" if i == ends else None
            if reason is not None:
                self.running.remove(rid)
                self.aborted.discard(rid)
            await self._manager.told(rid, reason)
            self.tell()
