"""SGLang's scheduler on a rank of the adaptive engine: where its own steps are hooked.

It stays SGLang's scheduler of one replica, with faults mended (``mended_scheduler.py``).  What is added: its lines
to the coordinator, the handlers of ``Prepare``/``Compile``/``Switch``/``Cancel``, load reports, and
:meth:`AdaptiveScheduler.enter_layout`, which makes it the scheduler of another TP group.

What the methods do is in the modules that they call.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from sglang.srt.managers.io_struct import (
    GetInternalStateReq,
    GetInternalStateReqOutput,
    InitWeightsUpdateGroupReqInput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    ProfileReq,
    ProfileReqOutput,
    TokenizedGenerateReqInput,
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

from sglang_pat.checks import census, tokens
from sglang_pat.host import groups, kv, memory, seeds, tree
from sglang_pat.host import requests as host
from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.controls import SINGLES
from sglang_pat.host.fixes.weight_updates import RECAPTURE_REFUSED
from sglang_pat.host.outputs import ControlSender, RpcRelay
from sglang_pat.host.v0_5_12.mended_scheduler import MendedScheduler
from sglang_pat.host.v0_5_12.runner import AdaptiveTpModelWorker
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import Cancel, Compile, InjectPrefixes, Prepare, StepPermit, Switch, TraceQuery
from sglang_pat.rank import degrees
from sglang_pat.rank.channels import RankChannel
from sglang_pat.rank.layouts import Layouts
from sglang_pat.rank.load_reports import LoadReporter, StepTrace, register
from sglang_pat.rank.output_check import check_outputs
from sglang_pat.rank.step_gate import StepGate
from sglang_pat.switch.executor import SwitchExecutor
from sglang_pat.switch.grammars import CompiledGrammars
from sglang_pat.switch.order import OutputSender

logger = logging.getLogger(__name__)

HELD_POLL_MILLISECONDS = 20
"""Longest sleep of a leader that holds; a request wakes it."""


class AdaptiveScheduler(MendedScheduler):
    """The scheduler of one rank.

    Life cycle: constructed in the base layout; from then on a follower or the leader of one TP
    group at a time, as :meth:`enter_layout` says.
    """

    def __init__(self, rank: int, channel_address: str, *, server_args: AdaptiveServerArgs, **kwargs: Any) -> None:
        self.adaptive = server_args.spec.config
        self.rank = rank
        self._channel_address = channel_address
        self._captured: list[Req] | None = None
        self.load = LoadReporter(self)
        self.trace = StepTrace()
        self.gate = StepGate()
        super().__init__(server_args=server_args, **kwargs)
        self.base_capacity = self.max_total_num_tokens
        self.layouts = Layouts(self.tp_worker)
        self.grammars = CompiledGrammars(self.grammar_manager.grammar_backend)
        self.executor = SwitchExecutor(self)
        self.executor.warm_up()
        check_outputs(self)
        self.enter_layout(self.adaptive.base, epoch=0)
        census.record(self, rank, epoch=0)

    # -- construction: SGLang's own steps, with our channels and worker ------------------------

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        self.channel = RankChannel(zmq.Context.instance(), self._channel_address, self.rank)
        self._can_lead = self.recv_from_tokenizer is not None
        self.output = OutputSender(self.send_to_detokenizer, self.rank, degrees.add_degrees_to_output)
        self._control = ControlSender(self.channel.send_sglang, self.end_waiting)
        self._silent = SenderWrapper(None)
        self._idle_sleeper = self.idle_sleeper
        if self._can_lead:
            assign(self, recv_from_rpc=RpcRelay(self.channel.send_sglang))

    def init_metrics(self, tp_rank: int, pp_rank: int, dp_rank: int | None) -> None:
        # Series of their own: every rank is built as the first rank of the only replica.
        super().init_metrics(tp_rank, pp_rank, self.rank)

    def init_tp_model_worker(self) -> None:
        self.tp_worker = AdaptiveTpModelWorker(
            rank=self.rank,
            folder=Path(self._channel_address.removeprefix("ipc://")).parent,
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

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher._mapping.update(
            {
                Prepare: lambda m: self.executor.prepare(m),
                Compile: lambda m: self.executor.compile(m),
                Switch: lambda m: self.executor.switch(m),
                Cancel: lambda m: self.executor.cancel(m),
                StepPermit: lambda m: self.gate.set_permit(m),
                TraceQuery: lambda m: self.trace.answer_query(self, m),
                InjectPrefixes: lambda m: tree.inject(self, m.prompts),
            }
        )

    # -- holding at a step (``--pat-policy schedule``) ---------------------------------------------

    @property
    def _engine_paused(self) -> bool:
        """Whether SGLang's loops make no step: paused by a client, or held by the schedule."""
        return self._paused_by_client or self.gate.closed

    @_engine_paused.setter
    def _engine_paused(self, paused: bool) -> None:
        self._paused_by_client = paused

    def recv_requests(self) -> list[Any]:
        self.executor.poll_command()
        if self.is_leader and self.gate.closed and self.gate.said:
            self.recv_from_tokenizer.poll(HELD_POLL_MILLISECONDS)
        return super().recv_requests()

    def _report_hold(self) -> None:
        if self.gate.closed and not self.gate.said:
            held = self.gate.make_hold_report(self.rank)
            if self.is_leader:
                self.load.report_held()
                self.channel.send(held)

    # -- which group this scheduler belongs to ---------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self.attn_tp_rank == 0

    def enter_layout(self, layout: ParallelLayout, epoch: int, fence: dict[int, int] | None = None) -> None:
        """Become the scheduler of this rank's TP group in ``layout``, with empty pools.

        Every attribute in which SGLang's scheduler keeps a group, a rank, a size or a pool is set
        here and in ``host/groups.py`` (docs/sglang.md lists them).
        """
        left = self.gate.close_for_switch(self.rank)
        if left is not None and self.is_leader:
            self.channel.send(left)
        runtime = self.layouts.install(layout)
        groups.set_scheduler_group(self, self.layouts.groups.get_tp_group(layout), runtime.tp_rank, layout.tp)
        kv.set_allocator(self, runtime.parts.allocator)
        self.clear_pools()
        leads = self.is_leader
        self.output.fence = fence
        assign(
            self,
            send_to_detokenizer=self.output if leads else self._silent,
            send_to_tokenizer=self._control if leads else self._silent,
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
        # Ranks of one group must draw the same numbers and different groups different ones; after a
        # switch neither holds by itself.  For a seed from (seed, switch, group) nothing has to be sent.
        seeds.set_seed((self.random_seed + 7919 * layout.group_of(self.rank) + 104729 * epoch) % (1 << 31))
        self.load.reset_for_new_group()

    def clear_pools(self) -> None:
        kv.clear_pools(self)

    # -- requests ---------------------------------------------------------------------------------

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        # Counted before handling: SGLang drops some (health checks) on the way.
        if self.is_leader:
            self.load.received += sum(isinstance(req, SINGLES) for req in recv_reqs)
        super().process_input_requests(recv_reqs)
        self._report_hold()

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        self._incoming, self._prompt, self._sealed = recv_req, None, None
        super().handle_generate_request(recv_req)

    def init_req_max_new_tokens(self, req: Req) -> None:
        # The one step that every path of SGLang's handler takes with the new request.
        req.pat_request, req.pat_sealed = self._incoming, self._sealed
        req.pat_prompt = array("I", req.origin_input_ids) if self._prompt is None else self._prompt
        # A request admitted in a tail layout, where the pool holds more tokens, must still fit in
        # the base layout.
        with assigned(self, max_total_num_tokens=self.base_capacity):
            super().init_req_max_new_tokens(req)
        register(req)
        degrees.begin(req, self.tp_size)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if self._captured is not None:
            self._set_or_validate_priority(req)  # one without a priority gets SGLang's default
            self._captured.append(req)
            return
        self.load.retracted += is_retracted and self.is_leader
        super()._add_request_to_queue(req, is_retracted)

    def construct(self, given: TokenizedGenerateReqInput, prompt: array, sealed: bytes) -> Req:
        """Make a ``Req`` by SGLang's own path, without queueing it; ``prompt`` and ``sealed`` are from its capsule."""
        self._captured = []
        self._incoming, self._prompt, self._sealed = given, prompt, sealed
        try:
            super().handle_generate_request(given)
            if self.grammar_manager.grammar_queue and not self._captured:
                self._captured.append(self.grammar_manager.grammar_queue.pop())
            (req,) = self._captured
        finally:
            self._captured = None
        return req

    def open_session(self, recv_req: OpenSessionReqInput) -> OpenSessionReqOutput | None:
        logger.warning("--adaptive-tp does not support sessions; refusing to open one")
        return OpenSessionReqOutput(recv_req.session_id, False)

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        with host.keep_piece_logprobs(self.waiting_queue):
            return super().get_new_batch_prefill()

    # -- load reports and the step trace ----------------------------------------------------------------

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        batch = super().get_next_batch_to_run()
        if batch is None:
            self.trace.mark_idle()
        if self.is_leader:
            self.load.report_if_due(batch)
            if batch is not None and batch.forward_mode.is_decode():
                self.layouts.log_missing_graph(len(batch.reqs))
        return batch

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        if self.is_leader:
            self.load.record_finished_requests(reqs)
        super().stream_output(reqs, return_logprob, skip_req)

    def stream_part(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        self.output.reqs = reqs
        super().stream_part(reqs, return_logprob, skip_req)

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        super().process_batch_result(batch, result)
        self.trace.end(self)

    def release_memory_occupation(self, recv_req: Any) -> Any:
        output = super().release_memory_occupation(recv_req)
        if self.rank == 0 and self.layouts.device == "cuda":
            memory.log_kept(self.server_args.spec.memory.kept, self.gpu_id)
        return output

    def flush_cache(self, empty_cache: bool = True) -> bool:
        success = super().flush_cache(empty_cache)
        if success and self.is_leader:
            # No step will follow that would report the emptied pool.
            self.load.force_next_report()
            self.load.send([])
        return success

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        self.trace.begin(batch)
        self.gate.record_step(batch.forward_mode.is_decode())
        result = super().run_batch(batch, *args, **kwargs)
        tokens.check(self, batch, result)
        return result

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

    def _count_update(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        try:
            return update(recv_req)
        finally:
            # After a failure as well: some of the weights may have changed, and no rank may count differently.
            self.layouts.weight_version += 1

    def update_weights_from_disk(self, recv_req: UpdateWeightFromDiskReqInput) -> Any:
        if recv_req.recapture_cuda_graph:
            # Nor is it needed: weights stay where the graphs of all layouts read them.
            return UpdateWeightFromDiskReqOutput(False, RECAPTURE_REFUSED)
        return self._count_update(super().update_weights_from_disk, recv_req)

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> Any:
        with self._use_physical_rank():
            return self._count_update(super().update_weights_from_tensor, recv_req)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> Any:
        return self._count_update(super().update_weights_from_distributed, recv_req)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> Any:
        with self._use_physical_rank():
            return self._count_update(super().update_weights_from_ipc, recv_req)

    def init_weights_update_group(self, recv_req: InitWeightsUpdateGroupReqInput) -> Any:
        with self._use_physical_rank():
            return super().init_weights_update_group(recv_req)

    def get_init_info(self) -> dict[str, Any]:
        return super().get_init_info() | {"pat_max_running": self.max_running_requests}

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        # To the outside the engine has N ranks in every layout.
        output.internal_state.update({"tp_size": self.adaptive.num_ranks, "dp_size": 1})
        return output
