"""SGLang's scheduler with its faults mended: the base class of ours (``host/scheduler.py``).

Each part says what SGLang's does instead, and where that is reported (``docs/upstream/`` for what had no report).
SGLang 0.5.16 still aborts by prefix, and its assert on a failed flush is in ``weight_updater``.

Upstream: https://github.com/sgl-project/sglang/pull/24123 (memory that is released while requests run)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.watchdog import WatchdogRaw

from sglang_pat.dropped import FATAL, Dropped, IsolatingDispatcher, ReadableSocket
from sglang_pat.host import kv, loop, tree
from sglang_pat.host import requests as host
from sglang_pat.host.assign import assign
from sglang_pat.host.controls import make_error_reply
from sglang_pat.host.fixes import float32, grammars, outputs, penalties, stop_patterns
from sglang_pat.host.fixes.weight_updates import NOT_FLUSHED
from sglang_pat.switch.requests import is_engine_idle


class MendedScheduler(Scheduler):
    """SGLang's ``Scheduler``, mended; what it drops is counted in ``dropped``."""

    def __init__(self, **kwargs: Any) -> None:
        args: ServerArgs = kwargs["server_args"]
        self.dropped = Dropped(args.enable_metrics)
        self._paused_turns = 0
        float32.force_float32(args)
        penalties.fix_order()
        stop_patterns.install_bounded_tail()
        outputs.keep_routed_experts()
        super().__init__(**kwargs)

    # -- messages that cannot be read or handled (docs/upstream/one_bad_message.md) ---------------------

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        if self.recv_from_tokenizer is not None:
            assign(self, recv_from_tokenizer=ReadableSocket(self.recv_from_tokenizer, self.dropped))

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher = IsolatingDispatcher(self._request_dispatcher, self.dropped, FATAL, make_error_reply)

    # -- pauses (docs/upstream/watchdog_in_a_pause.md, flush_in_a_pause.md) -----------------------------

    def init_soft_watchdog(self, server_args: ServerArgs) -> None:
        super().init_soft_watchdog(server_args)
        if server_args.soft_watchdog_timeout is not None:
            self._count_paused_turns(self.soft_watchdog)

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        super().init_watch_dog_memory_saver_input_blocker()
        self._count_paused_turns(self.watchdog)

    def _count_paused_turns(self, watchdog: WatchdogRaw) -> None:
        """Have SGLang's watchdog count turns of a paused loop, which is alive as long as it turns.

        It counts steps, and ends a rank that makes none with requests in it.
        """
        steps = watchdog.get_counter
        assign(watchdog, get_counter=lambda: (steps(), self._paused_turns))

    def recv_requests(self) -> list[Any]:
        self._paused_turns += self._engine_paused
        return super().recv_requests()

    def flush_cache(self, empty_cache: bool = True) -> bool:
        # A pause of the mode "retract" leaves requests that wait and hold no KV.  SGLang says that the cache can be
        # flushed then, so that they go on with new weights only, and (0.5.12) refuses it while anything waits.
        waiting, compiling = self.waiting_queue, self.grammar_manager.grammar_queue
        loop.drop_ended_batch(self)
        if self._engine_paused and all(kv.get_line(req) is None for req in waiting):
            loop.set_waiting(self, [], [])
        try:
            return super().flush_cache(empty_cache)
        finally:
            loop.set_waiting(self, waiting, compiling)

    def flush_cache_after_weight_update(self, recv_req: Any) -> None:
        self._not_flushed = recv_req.flush_cache and not self.flush_cache(empty_cache=recv_req.torch_empty_cache)

    def _warn_if_not_flushed(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        """Run SGLang's ``update``; its answer is a failure where SGLang would assert that the cache was flushed."""
        self._not_flushed = False
        answer = update(recv_req)
        if self._not_flushed:
            assign(answer, success=False, message=NOT_FLUSHED)
        return answer

    def update_weights_from_disk(self, recv_req: UpdateWeightFromDiskReqInput) -> Any:
        return self._warn_if_not_flushed(super().update_weights_from_disk, recv_req)

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> Any:
        return self._warn_if_not_flushed(super().update_weights_from_tensor, recv_req)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> Any:
        return self._warn_if_not_flushed(super().update_weights_from_distributed, recv_req)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> Any:
        return self._warn_if_not_flushed(super().update_weights_from_ipc, recv_req)

    def release_memory_occupation(self, recv_req: Any) -> Any:
        """Release memory on all ranks or on none; SGLang asserts that its rank is idle, and ends
        (https://github.com/sgl-project/sglang/pull/24123).

        Raises:
            RuntimeError: some rank still runs a request (a health probe, for one).
        """
        loop.drop_ended_batch(self)
        if not is_engine_idle(self):
            raise RuntimeError("memory is not released: a rank still has a request")
        return super().release_memory_occupation(recv_req)

    # -- aborts and retractions ------------------------------------------------------------------------

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort one request; SGLang takes all whose ids begin with the given one (docs/upstream/abort_by_prefix.md).

        The others are out of its sight meanwhile.
        """
        decoding, waiting = loop.list_requests(self)
        reqs = {id(req): req for req in decoding + waiting + (self.cur_batch.reqs if self.cur_batch else [])}
        others = [
            (req, req.rid)
            for req in reqs.values()
            if not recv_req.abort_all and req.rid != recv_req.rid and req.rid.startswith(recv_req.rid)
        ]
        for req, _ in others:
            assign(req, rid="")
        try:
            super().abort_request(recv_req)
        finally:
            for req, rid in others:
                assign(req, rid=rid)

    def end_waiting(self, abort: AbortReq, req: Req) -> None:
        """End ``req``, which waits with tokens and is aborted: all of them go to the client, as of one that runs
        (docs/upstream/aborted_while_waiting.md)."""
        outputs.abort(abort, req)
        if req.return_routed_experts:  # docs/upstream/experts_of_waiting.md
            outputs.collect_experts(req, tree.find_kv(self, req))
        self.stream_output([req], req.return_logprob)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.is_retracted:
            host.drop_piece_logprobs(req)  # docs/upstream/retracted_between_pieces.md
        super()._add_request_to_queue(req, is_retracted)

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        batch = super().get_new_batch_prefill()
        if batch is not None and any(req.output_ids for req in batch.reqs):
            # SGLang's penalties start from zero after a retraction (docs/upstream/penalties.md).
            assign(batch, sampling_info=penalties.make_sampling_info(batch, decode=False))
            for req in batch.reqs:
                req.pat_experts = None  # its KV has them again
        return batch

    # -- steps of requests that ask for different things -----------------------------------------------

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        if batch.has_grammar:
            grammars.forget_masks(batch.reqs)
        if batch.return_logprob:
            outputs.complete_token_ids(batch)
        result = super().run_batch(batch, *args, **kwargs)
        if batch.return_hidden_states and batch.forward_mode.is_extend():
            result.pat_lengths = batch.extend_lens
        if batch.has_grammar:
            grammars.abort_failed(batch.reqs)
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        if (lengths := getattr(result, "pat_lengths", None)) is not None:
            states = result.logits_output.hidden_states
            assign(result.logits_output, hidden_states=outputs.OwnRows(states, batch, lengths))
        super().process_batch_result(batch, result)

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        outputs.drop_scores_without_tokens(reqs)
        for part in outputs.group_by_outputs(reqs):
            self.stream_part(part, return_logprob, skip_req)

    def stream_part(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        """Call SGLang's ``stream_output`` for requests that ask for the same outputs."""
        super().stream_output(reqs, return_logprob, skip_req)
