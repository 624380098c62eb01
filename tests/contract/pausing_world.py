"""The server's own manager, a rank behind it that behaves like SGLang's, what clients do; no test of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct as io

from sglang_pat.host.fixes import pauses

from .pausing_rank import Rank
from .tokenizer_world import Manager, settle

UPDATES = {
    "disk": (io.UpdateWeightFromDiskReqInput, dict(model_path="m")),
    "tensor": (io.UpdateWeightsFromTensorReqInput, dict(serialized_named_tensors=[])),
    "distributed": (io.UpdateWeightsFromDistributedReqInput, dict(names=[], dtypes=[], shapes=[])),
    "ipc": (io.UpdateWeightsFromIPCReqInput, dict(zmq_handles={})),
}


class Call:
    """Something that somebody has asked for.

    Attributes:
        ended: whether a client has aborted it before a rank had any of it.
    """

    def __init__(self, kind: str, name: str, answer: Awaitable[Any]) -> None:
        self.kind, self.name = kind, name
        self.answer = asyncio.ensure_future(answer)
        self.ended = False

    @property
    def open(self) -> bool:
        return not self.answer.done()


class World:
    """Clients, trainers and the rank.

    Attributes:
        calls: all calls, in the order in which they came.
    """

    def __init__(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(pauses, "FLUSH_SECONDS", 1e-3)
        self.manager = Manager(monkeypatch)
        self.rank = Rank(self.manager)
        self.calls: list[Call] = []
        self.updated: list[int] = []
        """Numbers of the updates that were answered, in that order."""

    # -- what comes -------------------------------------------------------------------------------

    def generate(self, shape: str) -> None:
        """Ask for an answer; ``shape`` is ``one``, ``stream``, ``batch`` or ``n``."""
        name = f"c{len(self.calls)}"
        rid: Any = [f"{name}-{i}" for i in range(2)] if shape == "batch" else name
        n = 2 if shape == "n" else 1
        self._calls("generate", name, self.manager.ask(rid, stream=shape == "stream", n=n))

    def abort(self, which: int) -> None:
        """Abort one call by its id, or the first part of a batch."""
        calls = [call for call in self.calls if call.kind == "generate" and call.open]
        if calls:
            call = calls[which % len(calls)]
            call.ended |= self._unsent(call) and f"{call.name}-1" not in self.manager.rid_to_state
            self.manager.abort_request(call.name)
            self.manager.abort_request(f"{call.name}-0")

    def abort_all(self) -> None:
        for call in self.calls:
            call.ended |= call.kind == "generate" and call.open and self._unsent(call)
        self.manager.abort_request(abort_all=True)

    def leave(self, which: int) -> None:
        calls = [call for call in self.calls if call.kind == "generate" and call.open]
        if calls:
            calls[which % len(calls)].answer.cancel()

    def pause(self, mode: str) -> None:
        self._calls("pause", mode, self._pause(mode))

    async def _pause(self, mode: str) -> None:
        await self.manager.pause_generation(io.PauseGenerationReqInput(mode=mode))
        assert mode != "abort" or not any(self.manager.pat_list_active()), "what was aborted has not ended"

    def go_on(self) -> None:
        self._calls("continue", "", self.manager.continue_generation(io.ContinueGenerationReqInput()))

    def flush(self, seconds: float | None) -> None:
        self._calls("flush", "patient" if seconds else "plain", self.manager.flush_cache(timeout_s=seconds))

    def update(self, kind: str, aborts: bool) -> None:
        made, fields = UPDATES[kind]
        aborting = {} if kind == "ipc" else {"abort_all_requests": aborts}
        update = getattr(self.manager, f"update_weights_from_{kind}")
        self._calls("update", kind, self._update(len(self.calls), update(made(**fields, **aborting))))

    async def _update(self, number: int, answer: Awaitable[Any]) -> None:
        assert (await answer)[0]
        self.updated.append(number)

    def release(self, tag: str) -> None:
        self._calls(
            "release", tag, self.manager.release_memory_occupation(io.ReleaseMemoryOccupationReqInput(tags=[tag]))
        )

    def resume(self, tag: str) -> None:
        request = io.ResumeMemoryOccupationReqInput(tags=[tag])
        self._calls("resume", tag, self.manager.resume_memory_occupation(request))

    def probe(self) -> None:
        rid = f"{HEALTH_CHECK_RID_PREFIX}_{len(self.calls)}"
        self._calls("probe", rid, self._probe(rid))

    async def _probe(self, rid: str) -> None:
        """Do what SGLang's route for health checks does."""
        heard, asking = self.rank.heard, self.manager.ask(rid)
        while self.rank.heard == heard:
            await self.rank.news.wait()
        asking.cancel()
        self.manager.rid_to_state.pop(rid, None)

    def _calls(self, kind: str, name: str, answer: Awaitable[Any]) -> None:
        self.calls.append(Call(kind, name, answer))

    def _of(self, call: Call, rids: list[str]) -> bool:
        """Whether any of these ids is a part of the call."""
        named = self.manager._pat_named.get(call.name, ())
        return any(rid == call.name or rid.startswith(f"{call.name}-") or rid in named for rid in rids)

    def _unsent(self, call: Call) -> bool:
        """Whether the server has a call, and no rank has had any of it."""
        return self._of(call, list(self.manager.rid_to_state)) and not self._of(call, self.manager.requests)

    # -- what the ranks do ------------------------------------------------------------------------

    async def calm(self) -> None:
        """Have all that was sent handled; no step is made."""
        await settle()
        while self.rank.take():
            await settle()

    # -- what must hold, once it is calm ------------------------------------------------------------

    def check(self) -> None:
        """Check that whatever is not answered waits for a step of a rank, or for a client.

        Nobody may wait for one who waits for him.
        """
        aborting = [call for call in self.calls if call.kind == "pause" and call.open]
        for call in self.calls:
            if not call.open and not call.answer.cancelled():
                error = call.answer.exception()
                assert error is None or call.kind in ("release", "resume"), (call.kind, error)
            if call.ended:
                assert not call.open, f"{call.name} was aborted before a rank had it, and is not answered"
                if not call.answer.cancelled():
                    self.check_aborted(call)
            elif call.open:
                assert self.waits_rightly(call, aborting), f"{call.kind} {call.name} waits for nothing"
        wanted = {rid for parts in self.manager._pat_parts.values() for rid in parts}
        unwanted = {rid for rid in self.rank.running if not rid.startswith(HEALTH_CHECK_RID_PREFIX)} - wanted
        assert unwanted <= self.rank.aborted, "nobody waits for them, and they were not aborted"
        updates = [i for i, call in enumerate(self.calls) if call.kind == "update" and not call.open]
        assert self.updated == updates, "updates are answered in the order in which they came"

    def check_aborted(self, call: Call) -> None:
        """Check that a call was answered as aborted, without a token."""
        (answer,) = call.answer.result()
        for part in answer if isinstance(answer, list) else [answer]:
            assert part["meta_info"]["finish_reason"]["type"] == "abort" and not part["output_ids"]

    def waits_rightly(self, call: Call, aborting: list[Call]) -> bool:
        """Whether the table says that a call waits."""
        manager, rank = self.manager, self.rank
        if call.kind == "generate":
            return bool(manager.is_pause or rank.released or manager._pat_updates or self._of(call, rank.requests))
        if call.kind == "pause":
            return bool(rank.requests and not rank.paused) or call is not aborting[0]
        if call.kind == "continue":
            return bool(aborting)
        if call.kind == "update":
            return bool(rank.requests and not rank.paused)
        if call.kind == "flush":
            idle = not rank.requests or rank.paused == "retract"
            return bool(call.name == "patient" and not (idle and rank.flushed))  # after a failed one it waits a moment
        if call.kind == "probe":
            return bool(rank.requests and not rank.paused)
        return bool(call.kind == "release" and rank.aborted)

    # -- the end ----------------------------------------------------------------------------------

    async def end(self) -> None:
        """Let generation go on and resume memory, until everything has its answer."""
        await self.calm()
        for _ in range(200):
            if not any(call.open for call in self.calls) and not self.rank.requests:
                break
            if self.manager.is_pause and not any(call.kind == "continue" and call.open for call in self.calls):
                self.go_on()
            for tag in sorted(self.rank.released):
                self.resume(tag)
            await self.calm()
            await self.rank.step(0)
            await asyncio.sleep(1e-3)
            await self.calm()
            self.check()
        assert not [(call.kind, call.name) for call in self.calls if call.open]
        assert not self.rank.requests and not self.manager.rid_to_state
        assert not self.manager._pat_parts and not self.manager._pat_inside and not self.manager._pat_named
        assert not self.manager._pat_waiters._waiting and not self.manager._pat_at_gate._waiting
