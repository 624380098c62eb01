"""SGLang's scheduler on a rank of the adaptive engine: where its own steps are hooked.

It stays SGLang's scheduler of one replica, with faults mended.  What is added: its lines to the coordinator, the
handlers of ``Prepare``/``Compile``/``Switch``/``Cancel``, load reports, and :meth:`AdaptiveScheduler.enter_layout`,
which makes it the scheduler of another TP group.

SGLang composes it of components, which keep sockets and allocator for good.  So a rank's senders and its allocator
stay, too, and say in each layout what they are there.
"""

from __future__ import annotations

import dataclasses
import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.managers.io_struct import (
    GetInternalStateReq,
    GetInternalStateReqOutput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.observability.metrics_collector import SchedulerStats
from sglang.srt.runtime_context import get_device, get_exec, get_observability, get_parallel
from sglang.srt.server_args import PortArgs

from sglang_pat.checks import census, tokens
from sglang_pat.host import groups, kv, memory, runner, seeds, tree
from sglang_pat.host import requests as host
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.controls import SINGLES
from sglang_pat.host.outputs import ControlSender, RpcRelay
from sglang_pat.host.v0_5_23 import profiler
from sglang_pat.host.v0_5_23.mended_scheduler import MendedScheduler
from sglang_pat.host.v0_5_23.runner import AdaptiveTpModelWorker
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


class LeaderSender:
    """A sender that components keep for good, which sends while this rank leads a group.

    Args:
        sender: the sender of a leader.
    """

    def __init__(self, sender: Any) -> None:
        self._sender, self.leads = sender, True

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        if self.leads:
            self._sender.send_output(output, recv_obj)


class AdaptiveScheduler(MendedScheduler):
    """The scheduler of one rank.

    Life cycle: constructed in the base layout; from then on a follower or the leader of one TP
    group at a time, as :meth:`enter_layout` says.
    """

    def __init__(self, rank: int, channel_address: str, *, server_args: Any, port_args: PortArgs) -> None:
        self.adaptive = server_args.spec.config
        self.rank = rank
        self._channel_address = channel_address
        self._folder = Path(channel_address.removeprefix("ipc://")).parent
        self._captured: list[Req] | None = None
        self.load = LoadReporter(self)
        self.trace = StepTrace()
        self.gate = StepGate()
        with assigned(bootstrap, init_parallel_runtime=self._join_world):
            super().__init__(server_args=server_args, port_args=port_args)
        self.base_capacity = self.max_total_num_tokens
        self.layouts = Layouts(self.tp_worker)
        self.grammars = CompiledGrammars(self.grammar_manager.grammar_backend)
        self.executor = SwitchExecutor(self)
        self.executor.warm_up()
        check_outputs(self)
        self.enter_layout(self.adaptive.base, epoch=0)
        census.record(self, rank, epoch=0)

    # -- construction: SGLang's own steps, with our channels and worker ------------------------

    def _join_world(self, *, server_args: Any, device: str, dist_port: int) -> None:
        """Join one world of N ranks, with pooled groups, in place of SGLang's ``init_parallel_runtime``."""
        parallel = get_parallel()
        runner.share_cores(self.adaptive.num_ranks, self.rank)
        meeting = runner.find_meeting(parallel.dist_init_addr, dist_port, self._folder)
        self.groups = runner.join_world(
            self.adaptive, self.rank, get_device().gpu_id, device, meeting, get_exec().comm.disable_custom_all_reduce,
            parallel.dist_timeout,
        )  # fmt: skip
        initialize_dp_attention(server_args=server_args)

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        super().init_ipc_channels(port_args)
        assign(self, load_snapshot_writer=None)  # nobody reads it: the coordinator reports the load
        self.channel = RankChannel(zmq.Context.instance(), self._channel_address, self.rank)
        channels = self._sockets = self.ipc_channels
        self._can_lead = channels.recv_from_rpc is not None
        self.output = OutputSender(channels.send_to_detokenizer, self.rank, degrees.add_degrees_to_output)
        control = ControlSender(self.channel.send_sglang, self.end_waiting)
        self._senders = LeaderSender(self.output), LeaderSender(control)
        changed: dict[str, Any] = dict(zip(("send_to_detokenizer", "send_to_tokenizer"), self._senders, strict=True))
        if self._can_lead:
            changed["recv_from_rpc"] = RpcRelay(self.channel.send_sglang)
        assign(self, ipc_channels=dataclasses.replace(channels, **changed))

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
        assign(self, profiler_manager=profiler.make(self.profiler_manager, self.groups, self.rank))

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

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        self.executor.poll_command()
        if self.is_leader and self.gate.closed and self.gate.said:
            self.recv_from_tokenizer.poll(HELD_POLL_MILLISECONDS)
        return super().ingest_requests(stop_at_pause)

    def _report_hold(self) -> None:
        if self.gate.closed and not self.gate.said:
            held = self.gate.make_hold_report(self.rank)
            if self.is_leader:
                self.load.report_held()
                self.channel.send(held)

    # -- which group this scheduler belongs to ---------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return get_parallel().attn_tp_rank == 0

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
        for sender in self._senders:
            sender.leads = leads
        assign(self, idle_sleeper=self._idle_sleeper if leads else None)
        reporter, observed = self.metrics_reporter, get_observability()
        assign(
            reporter,
            is_stats_logging_rank=leads,
            current_scheduler_metrics_enabled=reporter.enable_metrics
            and (leads or observed.enable_metrics_for_all_schedulers),
        )
        # The estimate behind admission, which replicas have each learnt for themselves: ranks of one group must agree.
        self.new_token_ratio_tracker.reset()
        if reporter.enable_metrics and not reporter.current_scheduler_metrics_enabled:
            # The leader tells of its requests from now on; gauges that nobody sets would count them twice.
            assign(reporter, stats=SchedulerStats())
            reporter.metrics_collector.log_stats(reporter.stats)
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

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput, **options: Any) -> None:
        self._incoming, self._prompt, self._sealed = recv_req, None, None
        super().handle_generate_request(recv_req, **options)

    def init_req_max_new_tokens(self, req: Req) -> None:
        # The one step that every path of SGLang's handler takes with the new request.
        req.pat_request, req.pat_sealed = self._incoming, self._sealed
        req.pat_prompt = array("I", req.origin_input_ids) if self._prompt is None else self._prompt
        # A request admitted in a tail layout, where the pool holds more tokens, must still fit in
        # the base layout.
        with assigned(self, max_total_num_tokens=self.base_capacity):
            super().init_req_max_new_tokens(req)
        register(req)
        degrees.begin(req, get_parallel().tp_size)

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
        return OpenSessionReqOutput(session_id=recv_req.session_id, success=False)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        with host.keep_piece_logprobs(self.waiting_queue):
            return super().get_new_batch_prefill(running_batch)

    # -- load reports and the step trace ----------------------------------------------------------------

    def get_next_batch_to_run(self, *args: Any, **named: Any) -> NextBatchPlan:
        plan = super().get_next_batch_to_run(*args, **named)
        batch = plan.batch_to_run
        if batch is None:
            self.trace.mark_idle()
        if self.is_leader:
            with assigned(self, running_batch=plan.running_batch):  # the loop has not been told yet
                self.load.report_if_due(batch)
            if batch is not None and batch.forward_mode.is_decode():
                self.layouts.log_missing_graph(len(batch.reqs))
        return plan

    def record_outputs(self, reqs: list[Req]) -> None:
        # Before SGLang marks them as answered.
        if self.is_leader:
            self.load.record_finished_requests(reqs)
        self.output.reqs = reqs

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        super().process_batch_result(batch, result)
        self.trace.end(self)

    def report_release(self) -> None:
        if self.rank == 0 and self.layouts.device == "cuda":
            memory.log_kept(self.server_args.spec.memory.kept, get_device().gpu_id)

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

    # -- weights: every rank, addressed by its place in the engine -------------------------------------

    def count_update(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        """Run SGLang's ``update`` of the weights, and count it."""
        try:
            return update(recv_req)
        finally:
            # After a failure as well: some of the weights may have changed, and no rank may count differently.
            self.layouts.weight_version += 1

    def get_init_info(self) -> dict[str, Any]:
        return super().get_init_info() | {"pat_max_running": self.max_running_requests}

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        # To the outside the engine has N ranks in every layout.
        output.internal_state.update({"tp_size": self.adaptive.num_ranks, "dp_size": 1})
        return output
