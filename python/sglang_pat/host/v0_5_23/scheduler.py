"""Where SGLang's scheduler is hooked, and its faults mended: in its own methods, and in its components.

Components keep sockets and allocator for good.  So a rank's senders and its allocator stay, too, and say in each layout
what they are there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sglang.srt.distributed import bootstrap
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_device, get_exec, get_parallel
from sglang.srt.server_args import PortArgs

from sglang_pat.config import AdaptiveConfig
from sglang_pat.host import loop, runner
from sglang_pat.host import requests as host
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.batches import PROCESSED
from sglang_pat.host.fixes.scheduler import PartlyMendedScheduler
from sglang_pat.host.v0_5_23.components import (
    MendedOutputStreamer,
    MendedResultProcessor,
    MendedWeightUpdater,
    RankProfiler,
    remake,
)
from sglang_pat.host.v0_5_23.runner import AdaptiveTpModelWorker
from sglang_pat.host.v0_5_23.sampling import RebuildingGrammarManager
from sglang_pat.rank.speculation import Speculation


class RankScheduler(PartlyMendedScheduler):
    """SGLang's scheduler, mended, which calls what ``AdaptiveScheduler`` adds."""

    adaptive: AdaptiveConfig
    rank: int
    folder: Path
    speculation: Speculation

    def __init__(self, **kwargs: Any) -> None:
        with assigned(bootstrap, init_parallel_runtime=self._join_world):
            super().__init__(**kwargs)

    # -- construction: SGLang's own steps, with our channels and worker ------------------------

    def _join_world(self, *, server_args: Any, device: str, dist_port: int) -> None:
        """Join one world of N ranks, with pooled groups, in place of SGLang's ``init_parallel_runtime``."""
        parallel = get_parallel()
        runner.share_cores(self.adaptive.num_ranks, self.rank)
        meeting = runner.find_meeting(parallel.dist_init_addr, dist_port, self.folder)
        self.groups = runner.join_world(
            self.adaptive, self.rank, get_device().gpu_id, device, meeting, get_exec().comm.disable_custom_all_reduce,
            parallel.dist_timeout,
        )  # fmt: skip
        initialize_dp_attention(server_args=server_args)

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        assign(self, load_snapshot_writer=None)  # nobody reads it: the coordinator reports the load
        sockets = self._sockets = self.ipc_channels
        assign(self, ipc_channels=dataclasses.replace(sockets, **self.make_lines(sockets)))

    def init_metrics_collector(self) -> None:
        # Series of their own: every rank is built as the first rank of the only replica.
        with get_parallel().override(dp_rank=self.rank):
            super().init_metrics_collector()

    def init_idle_sleeper(self) -> None:
        with assigned(self, ipc_channels=self._sockets):
            super().init_idle_sleeper()
        self._idle_sleeper = self.idle_sleeper

    def init_tp_model_worker(self) -> None:
        self.tp_worker = AdaptiveTpModelWorker(
            rank=self.rank,
            groups=self.groups,
            server_args=self.server_args,
            gpu_id=get_device().gpu_id,
            nccl_port=self.nccl_port,
        )

    def init_profiler(self) -> None:
        super().init_profiler()
        profiler = remake(self.profiler_manager, RankProfiler)
        profiler.rank = self.rank
        # It stops without SGLang's barrier: ranks of a group may have come together in the middle of a profile.
        assign(profiler, dp_tp_cpu_group=self.groups.get_single_group().cpu_group)
        assign(self, profiler_manager=profiler)

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return MendedOutputStreamer

    def init_output_streamer(self) -> None:
        super().init_output_streamer()
        assert isinstance(self.output_streamer, MendedOutputStreamer), "this is the class given"
        self.output_streamer.scheduler = self

    def init_batch_result_processor(self) -> None:
        super().init_batch_result_processor()
        self.batch_result_processor = remake(self.batch_result_processor, MendedResultProcessor)

    def init_weight_updater(self) -> None:
        super().init_weight_updater()
        self.weight_updater = remake(self.weight_updater, MendedWeightUpdater)

    def init_grammar_manager(self) -> None:
        self.grammar_manager = RebuildingGrammarManager(self)

    # -- pauses ------------------------------------------------------------------------------------

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        self.begin_turn()
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

    # -- aborts ------------------------------------------------------------------------------------

    def abort_request(self, recv_req: AbortReq) -> None:
        running, waiting = loop.list_requests(self)
        with self.hide_others(recv_req, [*running, *waiting, *self.collect_inflight_reqs()]):
            super().abort_request(recv_req)

    def send_abort_output(self, abort_req: AbortReq, req: Req) -> None:
        if req.output_ids:
            self.end_waiting(abort_req, req)
        else:
            super().send_abort_output(abort_req, req)

    def send_last(self, req: Req) -> None:
        """Send the last output of ``req``."""
        self.output_streamer.stream_output([req], req.return_logprob)

    # -- steps -------------------------------------------------------------------------------------

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        with host.keep_piece_logprobs(self.waiting_queue):
            plan = super().get_new_batch_prefill(running_batch)
            self.remember_penalties(plan.batch_to_run)
            return plan

    def get_next_batch_to_run(self, *args: Any, **named: Any) -> NextBatchPlan:
        self.speculation.settle()
        plan = super().get_next_batch_to_run(*args, **named)
        with assigned(self, running_batch=plan.running_batch):  # the loop has not been told yet
            self.report_next(plan.batch_to_run)
        return plan

    def _reqs_finishing_inflight(self, batch: ScheduleBatch) -> list[Req]:
        # Of a step that was processed at once nothing is to come.
        processed = bool(self.result_queue) and self.result_queue[0][1] is PROCESSED
        return [] if processed else super()._reqs_finishing_inflight(batch)

    # -- a switch ----------------------------------------------------------------------------------

    def get_reporter(self) -> Any:
        """The object with SGLang's metrics."""
        return self.metrics_reporter

    def reset_estimate(self) -> None:
        """Forget how many tokens requests were seen to generate, by which SGLang admits others."""
        self.new_token_ratio_tracker.reset()
