"""Where SGLang's scheduler is hooked: in its own methods, and in attributes that a switch writes."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from sglang.srt.managers.io_struct import (
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
from sglang.srt.managers.scheduler import SenderWrapper
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.observability.metrics_collector import SchedulerStats
from sglang.srt.server_args import PortArgs

from sglang_pat.host import requests as host
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.fixes.weight_updates import RECAPTURE_REFUSED
from sglang_pat.host.outputs import ControlSender, RpcRelay
from sglang_pat.host.v0_5_12.mended_scheduler import MendedScheduler
from sglang_pat.host.v0_5_12.runner import AdaptiveTpModelWorker
from sglang_pat.rank.channels import RankChannel
from sglang_pat.rank.layouts import Layouts
from sglang_pat.rank.speculation import Speculation
from sglang_pat.switch.order import OutputSender


class RankScheduler(MendedScheduler):
    """SGLang's scheduler, mended, which calls what ``AdaptiveScheduler`` adds."""

    rank: int
    channel_address: str
    folder: Path
    layouts: Layouts
    speculation: Speculation

    # -- construction: SGLang's own steps, with our channels and worker ------------------------

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        self.channel = RankChannel(zmq.Context.instance(), self.channel_address, self.rank)
        self.output = OutputSender(self.send_to_detokenizer, self.rank, self.describe_output)
        self._control = ControlSender(self.channel.send_sglang, self.end_waiting)
        self._silent = SenderWrapper(None)
        # Followers tell nobody, but end what the leader ends: drafts come from it.
        self._silent_control = ControlSender(lambda reply: None, self.end_waiting)
        self._idle_sleeper = self.idle_sleeper
        if self.recv_from_tokenizer is not None:
            assign(self, recv_from_rpc=RpcRelay(self.channel.send_sglang))

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

    # -- steps -------------------------------------------------------------------------------------

    def recv_requests(self) -> list[Any]:
        self.begin_turn()
        return super().recv_requests()

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        with host.keep_piece_logprobs(self.waiting_queue):
            return super().get_new_batch_prefill()

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        self.speculation.settle()
        batch = super().get_next_batch_to_run()
        self.report_next(batch)
        return batch

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        self.record_outputs(reqs)
        super().stream_output(reqs, return_logprob, skip_req)

    def stream_part(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        self.output.reqs = reqs
        super().stream_part(reqs, return_logprob, skip_req)

    def lead(self, leads: bool) -> None:
        """Become the leader of the group that was entered, or one of its followers."""
        assign(
            self,
            send_to_detokenizer=self.output if leads else self._silent,
            send_to_tokenizer=self._control if leads else self._silent_control,
            idle_sleeper=self._idle_sleeper if leads else None,
            is_stats_logging_rank=leads,
            current_scheduler_metrics_enabled=self.enable_metrics
            and (leads or self.server_args.enable_metrics_for_all_schedulers),
            # The estimate behind admission, which replicas have each learnt for themselves: ranks of one group must
            # agree.
            new_token_ratio=self.init_new_token_ratio,
        )
        if self.enable_metrics and not self.current_scheduler_metrics_enabled:
            # The leader tells of its requests from now on; gauges that nobody sets would count them twice.
            assign(self, stats=SchedulerStats())
            self.metrics_collector.log_stats(self.stats)

    # -- SGLang's profiler ---------------------------------------------------------------------------

    def profile(self, recv_req: ProfileReq) -> ProfileReqOutput | None:
        if recv_req.merge_profiles:
            # Nobody waits until the last rank has written its file.
            advice = "merge_profiles: not with --adaptive-tp; leave it out, each rank writes a trace of its own"
            return ProfileReqOutput(success=False, message=advice)
        return super().profile(recv_req)

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

    def update_weights_from_disk(self, recv_req: UpdateWeightFromDiskReqInput) -> Any:
        if recv_req.recapture_cuda_graph:
            # Nor is it needed: weights stay where the graphs of all layouts read them.
            return UpdateWeightFromDiskReqOutput(False, RECAPTURE_REFUSED)
        return self.count_update(super().update_weights_from_disk, recv_req)

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> Any:
        with self._use_physical_rank():
            return self.count_update(super().update_weights_from_tensor, recv_req)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> Any:
        return self.count_update(super().update_weights_from_distributed, recv_req)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> Any:
        with self._use_physical_rank():
            return self.count_update(super().update_weights_from_ipc, recv_req)

    def init_weights_update_group(self, recv_req: InitWeightsUpdateGroupReqInput) -> Any:
        with self._use_physical_rank():
            return super().init_weights_update_group(recv_req)

    def release_memory_occupation(self, recv_req: Any) -> Any:
        output = super().release_memory_occupation(recv_req)
        self.report_release()
        return output
