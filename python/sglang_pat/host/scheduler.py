"""SGLang's scheduler on a rank of the adaptive engine.

It stays SGLang's scheduler of one replica, with faults mended.  What is added: its lines to the coordinator, the
handlers of ``Prepare``/``Compile``/``Switch``/``Cancel``, load reports, and :meth:`AdaptiveScheduler.enter_layout`,
which makes it the scheduler of another TP group.

Where SGLang's own steps are hooked or mended in one version only is in the adapter's ``scheduler.py``.  What the
methods do is in the modules that they call.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from sglang.srt.managers.io_struct import (
    GetInternalStateReq,
    GetInternalStateReqOutput,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.observability.metrics_collector import SchedulerStats

from sglang_pat.checks import census, tokens
from sglang_pat.host import adapter, groups, kv, loop, memory, outputs, requests, seeds, tree, verify
from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assign, assigned
from sglang_pat.host.batches import PROCESSED
from sglang_pat.host.controls import SINGLES
from sglang_pat.host.outputs import ControlSender, RpcRelay
from sglang_pat.host.requests import Req
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import Cancel, Compile, InjectPrefixes, Prepare, SiblingTexts, StepPermit, Switch, TraceQuery
from sglang_pat.rank import degrees, speculation
from sglang_pat.rank.channels import RankChannel
from sglang_pat.rank.layouts import Layouts
from sglang_pat.rank.load_reports import LoadReporter, StepTrace, register
from sglang_pat.rank.output_check import check_outputs
from sglang_pat.rank.speculation import Speculation
from sglang_pat.rank.step_gate import StepGate
from sglang_pat.switch.executor import SwitchExecutor
from sglang_pat.switch.grammars import CompiledGrammars
from sglang_pat.switch.order import OutputSender

if TYPE_CHECKING:
    from sglang_pat.host.v0_5_12.scheduler import RankScheduler
else:
    RankScheduler = adapter.scheduler.RankScheduler

logger = logging.getLogger(__name__)

HELD_POLL_MILLISECONDS = 20
"""Longest sleep of a leader that holds; a request wakes it."""


class AdaptiveScheduler(RankScheduler):
    """The scheduler of one rank.

    Life cycle: constructed in the base layout; from then on a follower or the leader of one TP
    group at a time, as :meth:`enter_layout` says.
    """

    def __init__(self, rank: int, channel_address: str, *, server_args: AdaptiveServerArgs, **kwargs: Any) -> None:
        self.adaptive = server_args.spec.config
        self.rank = rank
        self.channel_address = channel_address
        self.folder = Path(channel_address.removeprefix("ipc://")).parent
        self._captured: list[Req] | None = None
        self.load = LoadReporter(self)
        self.trace = StepTrace()
        self.gate = StepGate()
        super().__init__(server_args=server_args, **kwargs)
        self.base_capacity = self.max_total_num_tokens
        self.layouts = Layouts(self.tp_worker)
        self.grammars = CompiledGrammars(self.grammar_manager.grammar_backend)
        self.speculation = Speculation(self, server_args.spec.profile)
        self.executor = SwitchExecutor(self)
        self.executor.warm_up()
        check_outputs(self)
        self.enter_layout(self.adaptive.base, epoch=0)
        census.record(self, rank, epoch=0)

    def make_lines(self, sockets: Any) -> dict[str, Any]:
        """What stands in place of some of SGLang's ``sockets``, by their names: outputs are numbered, all else goes
        through the coordinator."""
        self.channel = RankChannel(zmq.Context.instance(), self.channel_address, self.rank)
        self.output = OutputSender(sockets.send_to_detokenizer, self.rank, self.describe_output)
        self.control = ControlSender(self.channel.send_sglang, self.end_waiting)
        lines: dict[str, Any] = {"send_to_detokenizer": self.output, "send_to_tokenizer": self.control}
        if sockets.recv_from_rpc is not None:
            lines["recv_from_rpc"] = RpcRelay(self.channel.send_sglang)
        return lines

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
                SiblingTexts: lambda m: self.speculation.take_in(m),
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

    def begin_turn(self) -> None:
        self.executor.poll_command()
        if self.is_leader and self.gate.closed and self.gate.said:
            self.recv_from_tokenizer.poll(HELD_POLL_MILLISECONDS)
        self._paused_turns += self._engine_paused

    def _report_hold(self) -> None:
        if self.gate.closed and not self.gate.said:
            held = self.gate.make_hold_report(self.rank)
            if self.is_leader:
                self.load.report_held()
                self.channel.send(held)

    # -- which group this scheduler belongs to ---------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return groups.get_place(self)[0] == 0

    def enter_layout(self, layout: ParallelLayout, epoch: int, fence: dict[int, int] | None = None) -> None:
        """Become the scheduler of this rank's TP group in ``layout``, with empty pools.

        Every attribute in which SGLang's scheduler keeps a group, a rank, a size or a pool is set
        here and in ``host/groups.py`` (docs/sglang.md lists them).
        """
        left = self.gate.close_for_switch(self.rank)
        if left is not None and self.is_leader:
            self.channel.send(left)
        runtime = self.layouts.install(layout)
        group = self.layouts.groups.get_tp_group(layout)
        groups.set_scheduler_group(self, group, layout.tp_rank(self.rank), layout.tp)
        adapter.rank.set_allocator(self, runtime.parts.allocator)
        kv.clear_pools(self)
        self.output.fence = fence
        self.lead(self.is_leader)
        # Ranks of one group must draw the same numbers and different groups different ones; after a
        # switch neither holds by itself.  For a seed from (seed, switch, group) nothing has to be sent.
        seeds.set_seed((self.random_seed + 7919 * layout.group_of(self.rank) + 104729 * epoch) % (1 << 31))
        self.load.reset_for_new_group()

    def lead(self, leads: bool) -> None:
        """Become the leader of the group that was entered, or one of its followers."""
        self.output.leads = self.control.leads = leads
        assign(self, idle_sleeper=self._idle_sleeper if leads else None)
        # The estimate behind admission, which replicas have each learnt for themselves: ranks of one group must agree.
        self.reset_estimate()
        reporter = self.get_reporter()
        reports = reporter.enable_metrics and (leads or self.server_args.enable_metrics_for_all_schedulers)
        assign(reporter, is_stats_logging_rank=leads, current_scheduler_metrics_enabled=reports)
        if reporter.enable_metrics and not reports:
            # The leader tells of its requests from now on; gauges that nobody sets would count them twice.
            assign(reporter, stats=SchedulerStats())
            reporter.metrics_collector.log_stats(reporter.stats)

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
        speculation.begin(req)
        degrees.begin(req, groups.get_place(self)[1])

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if self._captured is not None:
            self._set_or_validate_priority(req)  # one without a priority gets SGLang's default
            self._captured.append(req)
            return
        self.load.retracted += is_retracted and self.is_leader
        super()._add_request_to_queue(req, is_retracted)

    def construct(self, message: TokenizedGenerateReqInput, prompt: array, sealed: bytes) -> Req:
        """Make a ``Req`` by SGLang's own path, without queueing it; ``prompt`` and ``sealed`` are from its capsule."""
        self._captured = []
        self._incoming, self._prompt, self._sealed = message, prompt, sealed
        try:
            super().handle_generate_request(message)
            if self.grammar_manager.grammar_queue and not self._captured:
                self._captured.append(self.grammar_manager.grammar_queue.pop())
            (req,) = self._captured
        finally:
            self._captured = None
        return req

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        super().pause_generation(recv_req)
        # What runs is retracted, so that all of it is computed by weights that may come.  Prompts in pieces that a
        # switch has put into the queue have logprobs of the old ones.
        if recv_req.mode == "retract":
            for req in filter(requests.is_in_pieces, loop.list_queued(self)):
                requests.begin_prompt_again(req)

    def open_session(self, recv_req: OpenSessionReqInput) -> OpenSessionReqOutput | None:
        logger.warning("--adaptive-tp does not support sessions; refusing to open one")
        return OpenSessionReqOutput(session_id=recv_req.session_id, success=False)

    # -- load reports and the step trace ----------------------------------------------------------------

    def report_next(self, batch: ScheduleBatch | None) -> None:
        if batch is None:
            self.trace.mark_idle()
        if self.is_leader:
            self.load.report_if_due(batch)
            if batch is not None and batch.forward_mode.is_decode():
                self.layouts.log_missing_graph(len(batch.reqs))

    def record_outputs(self, reqs: list[Req]) -> None:
        # Before SGLang marks them as answered.
        if self.is_leader:
            self.load.record_finished_requests(reqs)
        self.output.reqs = reqs
        self.speculation.record_ended(reqs)

    def describe_output(self, output: Any, reqs: list[Req]) -> None:
        """Add to an output about some of ``reqs``, in their order, what their clients get in ``meta_info``."""
        if output_reqs := outputs.list_told(output, reqs):
            degrees.add_degrees_to_output(output, output_reqs)
            self.speculation.add_drafts_to_output(output, output_reqs)

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        if result is not PROCESSED:
            super().process_batch_result(batch, result)
            self.speculation.learn(batch.reqs, result)
            self.trace.end(self)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        success = super().flush_cache(empty_cache)
        if success and self.is_leader:
            # No step will follow that would report the emptied pool.
            self.load.force_next_report()
            self.load.send([])
        return success

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        drafts = self.speculation.draft(batch)
        checked = verify.check(self, batch, drafts, self._run_step) if drafts else None
        if checked is None:
            return self._run_step(batch, *args, **kwargs)
        self.speculation.record(checked)
        verify.process(self, checked, super().process_batch_result)
        self.speculation.learn(checked.reqs, checked.result)
        self.trace.end(self)
        return PROCESSED

    def _run_step(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        self.trace.begin(batch)
        self.gate.record_step(batch.forward_mode.is_decode())
        rows = self.speculation.list_rows(batch)
        result = super().run_batch(batch, *args, **kwargs)
        self.speculation.take(rows, result)
        tokens.check(self, batch, result)
        return result

    # -- weights and memory ------------------------------------------------------------------------------

    def count_update(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        try:
            return update(recv_req)
        finally:
            # After a failure as well: some of the weights may have changed, and no rank may count differently.
            self.layouts.weight_version += 1
            self.speculation.forget()

    def report_release(self) -> None:
        if self.rank == 0 and self.layouts.device == "cuda":
            memory.log_kept(self.server_args.spec.memory.kept, self.layouts.runner.gpu_id)

    def get_init_info(self) -> dict[str, Any]:
        return super().get_init_info() | {"pat_max_running": self.max_running_requests}

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        # To the outside the engine has N ranks in every layout.
        outer = {"tp_size": self.adaptive.num_ranks, "dp_size": 1, "world_size": self.adaptive.num_ranks}
        output.internal_state.update({name: size for name, size in outer.items() if name in output.internal_state})
        return output
