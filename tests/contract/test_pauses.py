"""SGLang's watchdog and a pause: by a client, or by the schedule."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from sglang.srt.managers import scheduler as stock
from sglang.srt.managers.scheduler import create_scheduler_watchdog

from sglang_pat.host import adapter
from sglang_pat.host.scheduler import AdaptiveScheduler
from sglang_pat.rank.step_gate import StepGate

from .graphs import OLD

pytestmark = pytest.mark.contract
TURN = "recv_requests" if OLD else "ingest_requests"
"""SGLang's method with which each turn of its loop begins."""


@pytest.fixture
def scheduler(monkeypatch) -> AdaptiveScheduler:
    """A scheduler with a batch, whose loop turns by hand."""
    monkeypatch.setattr(stock.Scheduler, TURN, lambda self, *_: [])
    monkeypatch.setattr(AdaptiveScheduler, "is_leader", False)
    made = AdaptiveScheduler.__new__(AdaptiveScheduler)
    made.is_initializing, made.forward_ct = False, 17
    setattr(made, adapter.rank.CURRENT_BATCH, object())
    made.gate, made._paused_turns = StepGate(), 0
    made.executor = SimpleNamespace(poll_command=lambda: None)
    made._engine_paused = False
    return made


def test_a_paused_loop_is_alive_as_long_as_it_turns(scheduler):
    watchdog = create_scheduler_watchdog(scheduler, watchdog_timeout=3600)
    assert watchdog.is_active()
    scheduler.count_paused_turns(watchdog)
    before = watchdog.get_counter()
    getattr(scheduler, TURN)()
    assert watchdog.get_counter() == before, "a loop that makes no steps though it may is stuck"
    scheduler._engine_paused = True
    assert watchdog.get_counter() == before, "so is one that does not turn"
    getattr(scheduler, TURN)()
    assert watchdog.get_counter() != before
    scheduler._engine_paused = False
    before = watchdog.get_counter()
    scheduler.forward_ct += 1
    assert watchdog.get_counter() != before


def test_both_watchdogs_count_so(scheduler, monkeypatch):
    monkeypatch.setattr(stock.Scheduler, "init_watch_dog_memory_saver_input_blocker", lambda self: None)
    monkeypatch.setattr(stock.Scheduler, "init_soft_watchdog", lambda self, *_: None)
    for soft in (False, True):
        name = "soft_watchdog" if soft else "watchdog"
        setattr(scheduler, name, create_scheduler_watchdog(scheduler, watchdog_timeout=3600, soft=soft))
    scheduler.init_watch_dog_memory_saver_input_blocker()
    scheduler.init_soft_watchdog(*([SimpleNamespace(soft_watchdog_timeout=3600)] if OLD else []))
    before = scheduler.watchdog.get_counter(), scheduler.soft_watchdog.get_counter()
    scheduler._engine_paused = True
    getattr(scheduler, TURN)()
    assert all(old != new for old, new in zip(
        before, (scheduler.watchdog.get_counter(), scheduler.soft_watchdog.get_counter()), strict=True
    ))  # fmt: skip


class Batch:
    """The part of a batch that the loop keeps."""

    def __init__(self, *ended: bool) -> None:
        self.reqs = [
            SimpleNamespace(finished=lambda ended=ended: ended, req_pool_idx=1, kv=SimpleNamespace(req_pool_idx=1))
            for ended in ended
        ]
        self.forward_mode = SimpleNamespace(is_extend=lambda: False)
        self.batch_is_full = False

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]


@pytest.mark.parametrize("ended", [(True, True), (True, False)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_right_after_the_last_answer(scheduler, monkeypatch, ended, overlap):
    """What has ended in the last step is not pending; what has not is, and is left alone."""
    batch, processed = Batch(*ended), []
    scheduler.running_batch = scheduler.last_batch = batch
    scheduler._pending_chunked_abort_req = None
    scheduler.waiting_queue, scheduler.chunked_req, scheduler.return_health_check_ipcs = [], None, []
    scheduler.enable_overlap, scheduler.result_queue = overlap, deque([("step", "result")] if overlap else [])
    scheduler.process_batch_result = lambda *step: processed.append(step)
    scheduler.grammar_manager = SimpleNamespace(grammar_queue=[])
    scheduler.load = SimpleNamespace(forget=lambda: None, send=lambda *_: None)
    # As SGLang tells that nothing is pending.
    monkeypatch.setattr(
        stock.Scheduler, "flush_cache",
        lambda self, _: self.running_batch.is_empty() and not self.last_batch and not self.result_queue,
    )  # fmt: skip
    assert scheduler.flush_cache() == all(ended)
    assert processed == ([("step", "result")] if overlap and all(ended) else [])
    assert len(batch.reqs) == (0 if all(ended) else 2)
