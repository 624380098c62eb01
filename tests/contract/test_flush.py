"""Flushes, updates and aborts in between: SGLang's own scheduler, whose pools are played; no engine."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.managers import scheduler as stock
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput, UpdateWeightFromDiskReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.host import adapter, loop
from sglang_pat.host.fixes.weight_updates import NOT_FLUSHED
from sglang_pat.host.scheduler import AdaptiveScheduler
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import LoadReport, Step
from sglang_pat.rank.load_reports import LoadReporter
from sglang_pat.rank.step_gate import StepGate

from .graphs import OLD

pytestmark = pytest.mark.contract


class Admits(Exception):
    """An error to tell that SGLang looks at the queue."""


def request(ended: bool) -> SimpleNamespace:
    return SimpleNamespace(
        finished=lambda: ended, req_pool_idx=1 if ended else None, output_ids=[1], origin_input_ids=[1], rid="x",
        time_stats=Mock(),
        pat_since=0, pat_limit=9, pat_family=1, pat_request=None, input_token_logprobs=None, beam_group=None,
        kv=SimpleNamespace(req_pool_idx=1 if ended else None, holds_kv=ended, holds_mamba=False),
    )  # fmt: skip


class Rank(AdaptiveScheduler):
    """A rank whose two running requests ended in the last step: no other had room beside them."""

    is_leader = True

    def __init__(self, overlap: bool = False, prefill: bool = False) -> None:
        self.gate, self._paused_by_client, self.rank, self.tp_size = StepGate(), False, 0, 1
        self.enable_overlap, self.result_queue = overlap, deque()
        mode = ForwardMode.EXTEND if prefill else ForwardMode.DECODE
        last = ScheduleBatch(reqs=[request(True), request(True)], batch_is_full=not prefill, forward_mode=mode)
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=True) if prefill else last
        self.last_batch, self.cur_batch, self.cur_batch_for_debug = last, last, last
        self.chunked_req, self._chunked_req_scheduled_last_iter = None, False
        self.waiting_queue, self.return_health_check_ipcs = [], deque()
        self.grammar_manager = SimpleNamespace(
            grammar_queue=[], has_waiting_grammars=lambda: False, clear=lambda: None, abort_requests=lambda req: None,
            grammar_backend=None,
        )  # fmt: skip
        self.dllm_manager, self.dllm_config = SimpleNamespace(any_staging_reqs=lambda: False), None
        self.disaggregation_mode, self.spec_algorithm = (
            stock.DisaggregationMode.NULL,
            SimpleNamespace(is_none=lambda: True),
        )
        for name in (
            "enable_hisparse enable_hierarchical_cache enable_priority_preemption is_hybrid_swa enable_fpm enable_lora "
            "require_mlp_sync prefill_delayer draft_worker device_module _engine_paused enable_hicache_storage "
            "_pending_flush external_corpus_manager send_to_tokenizer enable_lmcache _pending_chunked_abort_req "
            "enable_unified_cache_external_linker min_free_slots_delayer mm_receiver scheduler_stage_metrics "
            "hisparse_coordinator enable_continuous_input_polling".split()
        ):
            setattr(self, name, None)
        self.pp_size, self._prefill_decode_interval_remaining, self.processed_tokens_counter = 1, 0, 0
        self.metrics_reporter, self.flush_wrapper, self.beam_coordinator = Mock(), Mock(), Mock()
        pool = SimpleNamespace(
            reset=lambda: None, clear=lambda: None, available_size=lambda: 4, size=4,
            reset_aux_cache_allocator=lambda: None, finish=lambda *_: None,
        )  # fmt: skip
        self.tree_cache = self.req_to_token_pool = self.token_to_kv_pool_allocator = pool
        self.layouts = SimpleNamespace(weight_version=0, kv_totals={1: 4}, layout=ParallelLayout(1, 2))
        self.dropped = None
        self.reports: list[LoadReport] = []
        self.channel = SimpleNamespace(send=self.reports.append)
        self.speculation = Mock()
        self.load, self.trace = LoadReporter(self), SimpleNamespace(idle=lambda: None)
        self.session_controller = SimpleNamespace(maybe_reap=lambda now: None)
        self.policy = SimpleNamespace(calc_priority=self._admits)

    def _admits(self, *_, **__):
        raise Admits

    def get_next(self):
        """What SGLang's loop asks in each turn."""
        return self.get_next_batch_to_run(*([] if OLD else [self.running_batch, self.last_batch]))

    def _pp_microbatches_drained(self) -> bool:
        return True

    def _process_hicache_events(self, *_) -> None: ...

    def _release_aborted_request(self, req) -> None: ...

    def collect_inflight_reqs(self) -> list:
        return [*self.running_batch.reqs, *self.last_batch.reqs]

    def reset_metrics(self) -> None: ...

    def maybe_prepare_mlp_sync_batch(self, batch, need_sync=None):
        return batch

    def _maybe_prepare_ngram_embedding(self, batch):
        return batch

    def get_num_allocatable_reqs(self, running: int, **_) -> int:
        return 2 - running

    def _abort_on_waiting_timeout(self) -> None: ...

    def _abort_on_running_timeout(self) -> None: ...


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(stock, "empty_device_cache", lambda *_: None, raising=False)
    if OLD:
        return
    settings = SimpleNamespace(
        mm_feature_transport=None, enable_pd_role_switch=False, weight_version=None, gpu_id=3
    )  # fmt: skip
    for name in ("get_mm", "get_disagg", "get_serving"):
        monkeypatch.setattr(stock, name, lambda: settings)
    monkeypatch.setattr(adapter.scheduler, "get_device", lambda: settings)
    monkeypatch.setattr(stock, "_make_abort_req", lambda req, finished_reason=None: AbortReq(rid=req.rid))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("between", ["a flush", "a flush that fails", "an aborted switch"])
def test_a_replica_admits_requests_after_all_have_ended_at_once(overlap, prefill, between):
    rank = Rank(overlap, prefill)
    if between == "a flush":
        assert rank.flush_cache()
        rank.waiting_queue = [request(False)]
    else:
        rank.waiting_queue = [request(False)]
        assert not rank.flush_cache() if between == "a flush that fails" else not loop.drain(rank)
    with pytest.raises(Admits):
        rank.get_next()


def test_a_flush_in_a_pause_reports_those_that_wait():
    """Requests that wait for their grammar, which nothing polls in a pause, are reported too."""
    rank = Rank()
    rank._engine_paused, rank.waiting_queue = True, [request(False)]
    rank.grammar_manager.grammar_queue = compiling = [request(False)]
    assert rank.flush_cache()
    assert rank.reports[-1].waiting == 2 and len(rank.reports[-1].requests) == 2
    assert len(rank.waiting_queue) == 1 and rank.grammar_manager.grammar_queue is compiling


def test_a_request_that_came_and_went_within_a_turn_is_reported():
    rank = Rank()
    assert rank.flush_cache()
    rank.load.report_if_due(None)
    known = len(rank.reports)
    rank.load.report_if_due(None)
    assert len(rank.reports) == known
    rank._request_dispatcher = lambda req: None  # it is aborted, or refused, in the same turn
    given = Mock(spec=TokenizedGenerateReqInput, rid="x", positional_embed_overrides=None)
    rank.process_input_requests([given])
    rank.load.report_if_due(None)
    assert [report.received for report in rank.reports[known:]] == [1]


def test_steps_of_the_layout_before_are_not_reported_as_those_of_the_new_one():
    rank = Rank()
    rank.load.record_decode_step(Step(0.0, 0.5, 1, "decode", 2, 30))
    rank.load.reset_for_new_group()
    rank.load.report_if_due(None)
    assert rank.reports[-1].decoded.steps == 0
    rank.load.record_decode_step(Step(0.0, 0.5, 1, "decode", 2, 30))
    rank.load.force_next_report()
    rank.load.report_if_due(None)
    assert rank.reports[-1].decoded.steps == 1


def test_a_pause_of_the_machine_is_no_step_time_of_the_layout():
    rank = Rank()
    for seconds in (0.1, 9.0, 0.1, 0.1):
        rank.load.record_decode_step(Step(0.0, seconds, 1, "decode", 2, 30))
    rank.load.report_if_due(None)
    decoded = rank.reports[-1].decoded
    assert (decoded.steps, decoded.requests, decoded.tokens) == (4, 8, 120)
    assert decoded.seconds == pytest.approx(0.4)


def get_updater(rank):
    """SGLang's class that updates weights and releases memory, and the object of ours that does for ``rank``."""
    if OLD:
        return stock.Scheduler, rank
    kind = adapter.components.MendedWeightUpdater
    made = kind.__new__(kind)
    made.scheduler, made.flush_cache, made.draft_worker = rank, rank.flush_cache, None
    made.tp_worker, made.metrics_collector = getattr(rank, "tp_worker", None), None
    return stock.SchedulerWeightUpdaterManager, made


@pytest.mark.parametrize("others", [False, True])
def test_memory_is_released_on_all_ranks_or_on_none(others, monkeypatch, caplog):
    """``others`` says whether the other ranks are idle; this rank is."""
    rank, released = Rank(), []
    groups, runner = SimpleNamespace(world="all ranks"), SimpleNamespace(gpu_id=3)
    rank.layouts = SimpleNamespace(device="cuda", groups=groups, runner=runner)
    rank.server_args = SimpleNamespace(spec=SimpleNamespace(memory=SimpleNamespace(kept=5 << 29)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    caplog.set_level("INFO")

    def all_reduce(idle, how, group):
        assert idle.item() and how == dist.ReduceOp.MIN and group == "all ranks"
        idle.fill_(int(others))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    owner, part = get_updater(rank)
    monkeypatch.setattr(owner, "release_memory_occupation", lambda self, req: released.append(req))
    if others:
        part.release_memory_occupation("all")
    else:
        with pytest.raises(RuntimeError, match="a rank still has a request"):
            part.release_memory_occupation("all")
    assert released == (["all"] if others else [])
    said = (
        "by the plan a rank keeps 2.5 GiB for context, communicators and graphs of all layouts; GPU 3 has 10.0 GiB of"
    )
    assert (said in caplog.text) == others


def test_an_abort_means_one_id():
    """SGLang aborts every request whose id begins so; we abort the one that is named.

    The requests run, wait, are prefilled in pieces, or wait for grammars.
    """
    rank = Rank()
    reqs = {rid: request(False) for rid in ("job-1", "job-10", "job-11", "job-12", "job-13", "other")}
    for rid, req in reqs.items():
        req.rid, req.to_finish, req.grammar, req.mamba_pool_idx, req.output_ids = rid, None, None, None, []
        req.set_finish_with_abort = partial(setattr, req, "to_finish")
    running = [reqs["job-1"], reqs["job-10"]]
    rank.running_batch = rank.cur_batch = rank.last_batch = ScheduleBatch(reqs=running, batch_is_full=False)
    rank.waiting_queue, rank.chunked_req = [reqs["job-11"], reqs["other"]], reqs["job-12"]
    rank.grammar_manager = SimpleNamespace(grammar_queue=[reqs["job-13"]])
    rank.grammar_manager.abort_requests = partial(GrammarManager.abort_requests, rank.grammar_manager)
    answered = []
    rank.send_to_tokenizer = SimpleNamespace(send_output=lambda abort, req: answered.append(abort.rid))
    rank.ipc_channels, rank.rust_server = SimpleNamespace(send_to_tokenizer=rank.send_to_tokenizer), None

    def aborted() -> list[str]:
        return [rid for rid, req in reqs.items() if req.to_finish or rid in answered]

    rank.abort_request(AbortReq(rid="job-1"))
    assert aborted() == ["job-1"] and [req.rid for req in reqs.values()] == list(reqs)
    rank.abort_request(AbortReq(rid="job-11"))
    rank.abort_request(AbortReq(rid="job-13"))
    assert aborted() == ["job-1", "job-11", "job-13"] and rank.waiting_queue == [reqs["other"]]
    rank.abort_request(AbortReq(abort_all=True))
    assert aborted() == [rid for rid in reqs if rid != "job-12"]


@pytest.mark.parametrize("running", [False, True])
def test_an_update_whose_cache_cannot_be_flushed(running):
    """SGLang's rank asserts, and says nothing of the weights: they are new."""
    rank = Rank()
    rank.layouts = SimpleNamespace(weight_version=3, kv_totals={1: 4}, layout=ParallelLayout(1, 2))
    updater = SimpleNamespace(update_weights_from_disk=lambda *_, **__: (True, "done"))
    rank.tp_worker = SimpleNamespace(
        update_weights_from_disk=lambda req: (True, "done"),
        weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=updater))],
    )
    if running:
        rank.running_batch = ScheduleBatch(reqs=[request(False)], batch_is_full=False)
    _, part = get_updater(rank)
    answer = part.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path="m", flush_cache=True))
    assert (answer.success, answer.message) == ((not running), answer.message if running else "done")
    assert not running or (answer.message == NOT_FLUSHED if OLD else "Weights were updated, but" in answer.message)
    assert rank.layouts.weight_version == 4
