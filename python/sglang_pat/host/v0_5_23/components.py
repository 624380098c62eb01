"""Components of SGLang's scheduler: mended, and as a rank needs them."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.managers.io_struct import (
    ProfileReq,
    ProfileReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components import profiler_manager
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_pat.host.assign import Overlaid, assign, assigned
from sglang_pat.host.fixes.outputs import drop_scores_without_tokens
from sglang_pat.host.fixes.scheduler import refuse_merged_profiles, refuse_unless_idle
from sglang_pat.host.fixes.weight_updates import RECAPTURE_REFUSED


def remake(component: Any, kind: type) -> Any:
    """A component like ``component`` of SGLang's scheduler, but of the class ``kind``.

    What a component takes from the installed groups when it is made, it takes from those that are installed now.
    """
    return kind(**{field.name: getattr(component, field.name) for field in dataclasses.fields(component) if field.init})


class MendedOutputStreamer(SchedulerOutputStreamer):
    """SGLang's component that sends tokens to the detokenizer, mended.

    Attributes:
        scheduler: told of what goes out.
    """

    scheduler: Any

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        self.scheduler.record_outputs(reqs)
        drop_scores_without_tokens(reqs)
        super().stream_output(reqs, return_logprob, skip_req)


class MendedResultProcessor(SchedulerBatchResultProcessor):
    """SGLang's component that accounts for the results of steps, mended (docs/upstream/hidden_states.md)."""

    def _append_prefill_hidden_states(
        self,
        *,
        req: Req,
        logits_output: Any,
        hidden_state_offset: int,
        capture_hidden_mode: Any,
        extend_input_len: int,
        store: bool = True,
    ) -> int:
        """Append a request's states as SGLang does; of one that has tokens already, and computes its KV again, the
        last ones."""
        again = store and bool(req.output_ids) and req.return_hidden_states is True and capture_hidden_mode.is_full()
        end = super()._append_prefill_hidden_states(
            req=req,
            logits_output=logits_output,
            hidden_state_offset=hidden_state_offset,
            capture_hidden_mode=capture_hidden_mode,
            extend_input_len=extend_input_len,
            store=store and not again,
        )
        if again:
            req.hidden_states.append(logits_output.hidden_states[end - 1].cpu().tolist())
        return end


class MendedWeightUpdater(SchedulerWeightUpdaterManager):
    """SGLang's component that updates weights and releases memory; all ranks of the engine take an update, or none.

    Its worker is a :class:`~sglang_pat.host.v0_5_23.runner.AdaptiveTpModelWorker`.  An update outside a session is
    SGLang's to refuse, which all ranks do alike.
    """

    def update_weights_from_disk(self, recv_req: UpdateWeightFromDiskReqInput) -> Any:
        if recv_req.recapture_cuda_graph:
            # Nor is it needed: weights stay where the graphs of all layouts read them.
            return UpdateWeightFromDiskReqOutput(success=False, message=RECAPTURE_REFUSED)
        return self.scheduler.count_update(super().update_weights_from_disk, recv_req)

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> Any:
        """Update as SGLang does, on all ranks together."""
        if self._session is not None and (problem := self.tp_worker.open(recv_req)) is not None:
            return UpdateWeightsFromTensorReqOutput(success=False, message=problem)
        return self.scheduler.count_update(super().update_weights_from_tensor, recv_req)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> Any:
        """Update as SGLang does; what does not fit is received all the same, since its sender waits for us."""
        with self.tp_worker.use_receiver() as received:
            received.check_lengths(recv_req.names, recv_req.shapes)
            answer = self.scheduler.count_update(super().update_weights_from_distributed, recv_req)
        assign(answer, message=received.describe(answer.success, answer.message))
        return answer

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> Any:
        """Update as SGLang does; nothing is loaded from the first bucket on that does not fit."""
        with self.tp_worker.use_receiver() as received:
            answer = self.scheduler.count_update(super().update_weights_from_ipc, recv_req)
        if not answer.success and received.problem:
            assign(answer, message=received.problem)
        return answer

    def release_memory_occupation(self, recv_req: Any) -> Any:
        refuse_unless_idle(self.scheduler)
        answer = super().release_memory_occupation(recv_req)
        self.scheduler.report_release()
        return answer


class RankProfiler(SchedulerProfilerManager):
    """SGLang's profiler, which names a trace by this rank's number in the engine.

    Attributes:
        rank: that number.
    """

    rank: int

    def _profile(self, recv_req: ProfileReq) -> ProfileReqOutput | None:
        return refuse_merged_profiles(recv_req) or super()._profile(recv_req)

    def _stop_profile(self, stage: ForwardMode | None = None) -> ProfileReqOutput | None:
        named = Overlaid(get_parallel(), tp_rank=self.rank)
        with assigned(profiler_manager, get_parallel=lambda: named):
            return super()._stop_profile(stage)
