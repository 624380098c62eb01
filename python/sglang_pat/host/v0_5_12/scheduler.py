"""Where SGLang's scheduler is hooked, and its faults mended: in its own methods, and in attributes that a switch
writes.

Faults are mended here that SGLang 0.5.23 has mended itself, or has in other classes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    InitWeightsUpdateGroupReqInput,
    ProfileReq,
    ProfileReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import PortArgs

from sglang_pat.host import kv, loop
from sglang_pat.host import requests as host
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.fixes.outputs import drop_scores_without_tokens
from sglang_pat.host.fixes.scheduler import PartlyMendedScheduler, refuse_merged_profiles, refuse_unless_idle
from sglang_pat.host.fixes.weight_updates import NOT_FLUSHED, RECAPTURE_REFUSED
from sglang_pat.host.v0_5_12 import outputs, sampling
from sglang_pat.host.v0_5_12.runner import AdaptiveTpModelWorker
from sglang_pat.rank.layouts import Layouts
from sglang_pat.rank.speculation import Speculation


class RankScheduler(PartlyMendedScheduler):
    """SGLang's scheduler, mended, which calls what ``AdaptiveScheduler`` adds."""

    rank: int
    folder: Path
    layouts: Layouts
    speculation: Speculation

    # -- construction: SGLang's own steps, with our channels and worker ------------------------

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        assign(self, **self.make_lines(self))
        self._idle_sleeper = self.idle_sleeper

    def init_metrics(self, tp_rank: int, pp_rank: int, dp_rank: int | None) -> None:
        # Series of their own: every rank is built as the first rank of the only replica.
        super().init_metrics(tp_rank, pp_rank, self.rank)

    def init_tp_model_worker(self) -> None:
        self.tp_worker = AdaptiveTpModelWorker(
            rank=self.rank,
            folder=self.folder,
            server_args=self.server_args,
            gpu_id=self.gpu_id,
            tp_rank=self.tp_rank,
            moe_ep_rank=self.moe_ep_rank,
            pp_rank=self.pp_rank,
            attn_cp_rank=self.attn_cp_rank,
            moe_dp_rank=self.moe_dp_rank,
            dp_rank=self.dp_rank,
            nccl_port=self.nccl_port,
        )

    # -- pauses (docs/upstream/flush_in_a_pause.md) -----------------------------------------------------

    def recv_requests(self) -> list[Any]:
        self.begin_turn()
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

    # -- aborts and retractions ------------------------------------------------------------------------

    def abort_request(self, recv_req: AbortReq) -> None:
        decoding, waiting = loop.list_requests(self)
        with self.hide_others(recv_req, decoding + waiting + (self.cur_batch.reqs if self.cur_batch else [])):
            super().abort_request(recv_req)

    def send_last(self, req: Req) -> None:
        """Send the last output of ``req``."""
        self.stream_output([req], req.return_logprob)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if req.is_retracted:
            host.drop_piece_logprobs(req)  # docs/upstream/retracted_between_pieces.md
        super()._add_request_to_queue(req, is_retracted)

    # -- steps, also of requests that ask for different things -------------------------------------------

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        with host.keep_piece_logprobs(self.waiting_queue):
            batch = super().get_new_batch_prefill()
            self.remember_penalties(batch)
            return batch

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        self.speculation.settle()
        batch = super().get_next_batch_to_run()
        self.report_next(batch)
        return batch

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
        self.record_outputs(reqs)
        drop_scores_without_tokens(reqs)
        for part in outputs.group_by_outputs(reqs):
            self.output.reqs = part
            super().stream_output(part, return_logprob, skip_req)

    # -- a switch --------------------------------------------------------------------------------------

    def get_reporter(self) -> Any:
        """The object with SGLang's metrics."""
        return self

    def reset_estimate(self) -> None:
        """Forget how many tokens requests were seen to generate, by which SGLang admits others."""
        assign(self, new_token_ratio=self.init_new_token_ratio)

    # -- SGLang's profiler ---------------------------------------------------------------------------

    def profile(self, recv_req: ProfileReq) -> ProfileReqOutput | None:
        return refuse_merged_profiles(recv_req) or super().profile(recv_req)

    def stop_profile(self, stage: ForwardMode | None = None) -> ProfileReqOutput | None:
        """Stop without SGLang's barrier: ranks of a group may have come together in the middle of a profile.

        The trace is named by this rank's number in the engine.
        """
        alone = self.layouts.groups.get_single_group().cpu_group
        with assigned(self, tp_rank=self.rank, dp_tp_cpu_group=alone):
            return super().stop_profile(stage)

    # -- weights: every rank, addressed by its place in the engine -------------------------------------

    @contextmanager
    def _use_physical_rank(self):
        """Let SGLang address this rank by its number in the engine (per-rank tensors, update groups)."""
        with assigned(self.tp_worker, tp_rank=self.rank), assigned(self.layouts.runner, tp_rank=self.rank):
            yield

    def flush_cache_after_weight_update(self, recv_req: Any) -> None:
        self._not_flushed = recv_req.flush_cache and not self.flush_cache(empty_cache=recv_req.torch_empty_cache)

    def _run_update(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        """Run SGLang's ``update``; its answer is a failure where SGLang would assert that the cache was flushed."""
        self._not_flushed = False
        answer = self.count_update(update, recv_req)
        if self._not_flushed:
            assign(answer, success=False, message=NOT_FLUSHED)
        return answer

    def update_weights_from_disk(self, recv_req: UpdateWeightFromDiskReqInput) -> Any:
        if recv_req.recapture_cuda_graph:
            # Nor is it needed: weights stay where the graphs of all layouts read them.
            return UpdateWeightFromDiskReqOutput(False, RECAPTURE_REFUSED)
        return self._run_update(super().update_weights_from_disk, recv_req)

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> Any:
        with self._use_physical_rank():
            return self._run_update(super().update_weights_from_tensor, recv_req)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> Any:
        return self._run_update(super().update_weights_from_distributed, recv_req)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> Any:
        with self._use_physical_rank():
            return self._run_update(super().update_weights_from_ipc, recv_req)

    def init_weights_update_group(self, recv_req: InitWeightsUpdateGroupReqInput) -> Any:
        with self._use_physical_rank():
            return super().init_weights_update_group(recv_req)

    def release_memory_occupation(self, recv_req: Any) -> Any:
        refuse_unless_idle(self)
        output = super().release_memory_occupation(recv_req)
        self.report_release()
        return output
