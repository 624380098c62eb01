"""SGLang's scheduler with its faults mended: what is in its components, and what SGLang 0.5.12 has in other methods."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_pat.host import loop
from sglang_pat.host.assign import assign
from sglang_pat.host.fixes.outputs import drop_scores_without_tokens
from sglang_pat.host.fixes.scheduler import PartlyMendedScheduler, refuse_unless_idle
from sglang_pat.host.fixes.weight_updates import RECAPTURE_REFUSED
from sglang_pat.host.v0_5_23.sampling import RebuildingGrammarManager


def remake(component: Any, kind: type | None = None, **values: Any) -> Any:
    """A component like ``component`` of SGLang's scheduler, but of the class ``kind`` and with other ``values``.

    What a component takes from the installed groups when it is made, it takes from those that are installed now.

    Raises:
        TypeError: the component has no such field; nothing is made.
    """
    given = {field.name: getattr(component, field.name) for field in dataclasses.fields(component) if field.init}
    return (kind or type(component))(**given | values)


class MendedOutputStreamer(SchedulerOutputStreamer):
    """SGLang's component that sends tokens to the detokenizer, mended.

    Attributes:
        scheduler: told of what goes out.
    """

    scheduler: MendedScheduler

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        self.scheduler.record_outputs(reqs)
        drop_scores_without_tokens(reqs)
        super().stream_output(reqs, return_logprob, skip_req)


class MendedWeightUpdater(SchedulerWeightUpdaterManager):
    """SGLang's component that updates weights and releases memory; all ranks of the engine take an update, or none.

    Its worker is a :class:`~sglang_pat.host.v0_5_23.weight_updates.WholeUpdatesTpModelWorker`.  An update outside a
    session is SGLang's to refuse, which all ranks do alike.
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


class MendedScheduler(PartlyMendedScheduler):
    """SGLang's ``Scheduler``, mended."""

    # -- components ------------------------------------------------------------------------------------

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return MendedOutputStreamer

    def init_output_streamer(self) -> None:
        super().init_output_streamer()
        assert isinstance(self.output_streamer, MendedOutputStreamer), "this is the class given"
        self.output_streamer.scheduler = self

    def init_weight_updater(self) -> None:
        super().init_weight_updater()
        self.weight_updater = remake(self.weight_updater, MendedWeightUpdater)

    def init_grammar_manager(self) -> None:
        self.grammar_manager = RebuildingGrammarManager(self)

    # -- pauses (docs/upstream/watchdog_in_a_pause.md) --------------------------------------------------

    def init_soft_watchdog(self) -> None:
        super().init_soft_watchdog()
        if (watchdog := getattr(self, "soft_watchdog", None)) is not None:
            self.count_paused_turns(watchdog)

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        self._paused_turns += self._engine_paused
        return super().ingest_requests(stop_at_pause)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        loop.drop_ended_batch(self)
        # SGLang lets requests wait that a pause has retracted, but for those that wait for their grammar.
        queued, compiling = self.waiting_queue, self.grammar_manager.grammar_queue
        if self._engine_paused:
            loop.set_waiting(self, queued, [])
        try:
            return super().flush_cache(empty_cache)
        finally:
            loop.set_waiting(self, queued, compiling)

    # -- aborts and retractions ------------------------------------------------------------------------

    def abort_request(self, recv_req: AbortReq) -> None:
        running, waiting = loop.list_requests(self)
        with self.hide_others(recv_req, [*running, *waiting, *self.collect_inflight_reqs()]):
            super().abort_request(recv_req)

    def send_abort_output(self, abort_req: AbortReq, req: Req) -> None:
        if req.output_ids:
            self.end_waiting(abort_req, req)
        else:
            super().send_abort_output(abort_req, req)

    def end_waiting(self, abort: AbortReq, req: Req) -> None:
        """End ``req``, which waits with tokens and is aborted."""
        self.prepare_end(abort, req)
        self.output_streamer.stream_output([req], req.return_logprob)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        plan = super().get_new_batch_prefill(running_batch)
        self.remember_penalties(plan.batch_to_run)
        return plan
