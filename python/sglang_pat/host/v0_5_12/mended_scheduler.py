"""SGLang's scheduler with its faults mended: what SGLang 0.5.23 has mended itself, or has in other classes."""

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
from sglang.srt.server_args import ServerArgs

from sglang_pat.host import kv, loop
from sglang_pat.host import requests as host
from sglang_pat.host.assign import assign
from sglang_pat.host.fixes.outputs import drop_scores_without_tokens
from sglang_pat.host.fixes.scheduler import PartlyMendedScheduler, refuse_unless_idle
from sglang_pat.host.fixes.weight_updates import NOT_FLUSHED
from sglang_pat.host.v0_5_12 import outputs, sampling


class MendedScheduler(PartlyMendedScheduler):
    """SGLang's ``Scheduler``, mended."""

    # -- pauses (docs/upstream/watchdog_in_a_pause.md, flush_in_a_pause.md) -----------------------------

    def init_soft_watchdog(self, server_args: ServerArgs) -> None:
        super().init_soft_watchdog(server_args)
        if server_args.soft_watchdog_timeout is not None:
            self.count_paused_turns(self.soft_watchdog)

    def recv_requests(self) -> list[Any]:
        self._paused_turns += self._engine_paused
        return super().recv_requests()

    def flush_cache(self, empty_cache: bool = True) -> bool:
        # A pause of the mode "retract" leaves requests that wait and hold no KV.  SGLang says that the cache can be
        # flushed then, so that they go on with new weights only, and refuses it while anything waits.
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
        refuse_unless_idle(self)
        return super().release_memory_occupation(recv_req)

    # -- aborts and retractions ------------------------------------------------------------------------

    def abort_request(self, recv_req: AbortReq) -> None:
        decoding, waiting = loop.list_requests(self)
        with self.hide_others(recv_req, decoding + waiting + (self.cur_batch.reqs if self.cur_batch else [])):
            super().abort_request(recv_req)

    def end_waiting(self, abort: AbortReq, req: Req) -> None:
        """End ``req``, which waits with tokens and is aborted."""
        self.prepare_end(abort, req)
        self.stream_output([req], req.return_logprob)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.is_retracted:
            host.drop_piece_logprobs(req)  # docs/upstream/retracted_between_pieces.md
        super()._add_request_to_queue(req, is_retracted)

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        batch = super().get_new_batch_prefill()
        self.remember_penalties(batch)
        return batch

    # -- steps of requests that ask for different things -----------------------------------------------

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        if batch.has_grammar:
            sampling.forget_masks(batch.reqs)
        if batch.return_logprob:
            outputs.complete_token_ids(batch)
        result = super().run_batch(batch, *args, **kwargs)
        if batch.return_hidden_states and batch.forward_mode.is_extend():
            result.pat_lengths = batch.extend_lens
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        if (lengths := getattr(result, "pat_lengths", None)) is not None:
            states = result.logits_output.hidden_states
            assign(result.logits_output, hidden_states=outputs.OwnRows(states, batch, lengths))
        super().process_batch_result(batch, result)

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        drop_scores_without_tokens(reqs)
        for part in outputs.group_by_outputs(reqs):
            self.stream_part(part, return_logprob, skip_req)

    def stream_part(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        """Call SGLang's ``stream_output`` for requests that ask for the same outputs."""
        super().stream_output(reqs, return_logprob, skip_req)
