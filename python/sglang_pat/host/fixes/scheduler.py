"""SGLang's scheduler with its faults mended: what both versions need of the base class of ours (``host/scheduler.py``).

Each part says what SGLang's does instead, and where that is reported (``docs/upstream/`` for what had no report).  The
whole class is ``RankScheduler`` of the adapter's ``scheduler``.

Upstream: https://github.com/sgl-project/sglang/pull/24123 (memory that is released while requests run)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, ProfileReq, ProfileReqOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling import penaltylib
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.watchdog import WatchdogRaw

from sglang_pat.dropped import FATAL, Dropped, IsolatingDispatcher, ReadableSocket
from sglang_pat.host import loop, tree
from sglang_pat.host.assign import assign
from sglang_pat.host.controls import make_error_reply
from sglang_pat.host.fixes import float32, grammars, outputs, penalties, stop_patterns
from sglang_pat.switch.requests import is_engine_idle


def refuse_merged_profiles(recv_req: ProfileReq) -> ProfileReqOutput | None:
    """The answer to a request for one trace of all ranks: nobody waits until the last rank has written its file."""
    if not recv_req.merge_profiles:
        return None
    advice = "merge_profiles: not with --adaptive-tp; leave it out, each rank writes a trace of its own"
    return ProfileReqOutput(success=False, message=advice)


class PartlyMendedScheduler(Scheduler):
    """SGLang's ``Scheduler``, mended as far as both versions are alike; what it drops is counted in ``dropped``."""

    def __init__(self, **kwargs: Any) -> None:
        args: ServerArgs = kwargs["server_args"]
        self.dropped = Dropped(args.enable_metrics)
        self._paused_turns = 0
        float32.force_float32(args)
        assign(penaltylib, BatchedPenalizerOrchestrator=penalties.OrderedPenalties)
        assign(Req, tail_str=stop_patterns.tail_str)
        outputs.keep_experts()
        super().__init__(**kwargs)

    # -- messages that cannot be read or handled (docs/upstream/one_bad_message.md) ---------------------

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        if self.recv_from_tokenizer is not None:
            assign(self, recv_from_tokenizer=ReadableSocket(self.recv_from_tokenizer, self.dropped))

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher = IsolatingDispatcher(self._request_dispatcher, self.dropped, FATAL, make_error_reply)

    # -- pauses (docs/upstream/watchdog_in_a_pause.md) --------------------------------------------------

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        super().init_watch_dog_memory_saver_input_blocker()
        self.count_paused_turns(self.watchdog)

    def init_soft_watchdog(self, *args: Any) -> None:
        super().init_soft_watchdog(*args)
        if (watchdog := getattr(self, "soft_watchdog", None)) is not None:
            self.count_paused_turns(watchdog)

    def count_paused_turns(self, watchdog: WatchdogRaw) -> None:
        """Have SGLang's watchdog count turns of a paused loop, which is alive as long as it turns.

        It counts steps, and ends a rank that makes none with requests in it.
        """
        steps = watchdog.get_counter
        assign(watchdog, get_counter=lambda: (steps(), self._paused_turns))

    # -- aborts and retractions ------------------------------------------------------------------------

    @contextmanager
    def hide_others(self, recv_req: AbortReq, reqs: Iterable[Req]) -> Iterator[None]:
        """Have SGLang abort one request inside the block.

        It takes all whose ids begin with the given one (docs/upstream/abort_by_prefix.md).  So the others of ``reqs``,
        all that the scheduler has, are out of its sight meanwhile.
        """
        others = [
            (req, req.rid)
            for req in {id(req): req for req in reqs}.values()
            if not recv_req.abort_all and req.rid != recv_req.rid and req.rid.startswith(recv_req.rid)
        ]
        for req, _ in others:
            assign(req, rid="")
        try:
            yield
        finally:
            for req, rid in others:
                assign(req, rid=rid)

    def end_waiting(self, abort: AbortReq, req: Req) -> None:
        """End ``req``, which waits with tokens and is aborted: all tokens go to the client, as of one that runs
        (docs/upstream/aborted_while_waiting.md)."""
        outputs.abort(abort, req)
        if req.return_routed_experts:  # docs/upstream/experts_of_waiting.md
            outputs.collect_experts(req, tree.find_kv(self, req))
        self.send_last(req)

    def remember_penalties(self, batch: ScheduleBatch | None) -> None:
        """Have the penalties of a prefill ``batch`` count the tokens that its requests have generated already.

        SGLang's start from zero after a retraction (docs/upstream/penalties.md).
        """
        if batch is not None and any(req.output_ids for req in batch.reqs):
            assign(batch, sampling_info=penalties.make_sampling_info(batch, decode=False))
            for req in batch.reqs:
                req.pat_experts = None  # its KV has them again

    # -- steps -----------------------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        result = super().run_batch(batch, *args, **kwargs)
        if batch.has_grammar:
            grammars.abort_failed(batch.reqs)
        return result


def refuse_unless_idle(scheduler: Any) -> None:
    """Release memory on all ranks or on none; SGLang asserts that its rank is idle, and ends
    (https://github.com/sgl-project/sglang/pull/24123).

    Raises:
        RuntimeError: some rank still runs a request (a health probe, for one).
    """
    loop.drop_ended_batch(scheduler)
    if not is_engine_idle(scheduler):
        raise RuntimeError("memory is not released: a rank still has a request")
