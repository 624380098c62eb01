"""The step trace knows what was launched, also where results come a step later and with less."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.host import adapter
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import TraceQuery
from sglang_pat.rank.load_reports import StepTrace


def batch(mode: ForwardMode, requests: int, **sums: int) -> ScheduleBatch:
    made = ScheduleBatch(reqs=[SimpleNamespace(rid=i) for i in range(requests)])
    made.forward_mode = mode
    for name, value in sums.items():
        setattr(made, name, value)
    made.seq_lens_cpu = torch.tensor([sums.get("seq_lens_sum", 0)])
    return made


@pytest.fixture
def scheduler():
    sent = []
    load = SimpleNamespace(record_decode_step=lambda step: None, count=lambda counts: None)
    channel = SimpleNamespace(send=sent.append)
    layouts = SimpleNamespace(layout=ParallelLayout(2, 1))
    return SimpleNamespace(rank=0, is_leader=True, layouts=layouts, channel=channel, load=load, sent=sent)


def test_steps_in_the_order_of_their_launch(scheduler):
    """Overlap launches a step before the results of the one before it are in."""
    trace = StepTrace()
    launched = [
        batch(ForwardMode.EXTEND, 3, extend_num_tokens=96),
        batch(ForwardMode.DECODE, 3, seq_lens_sum=99),
        batch(ForwardMode.DECODE, 2, seq_lens_sum=70),
    ]
    trace.begin(launched[0])
    for later in launched[1:]:
        trace.begin(later)
        trace.end(scheduler)
    trace.end(scheduler)
    trace.answer_query(scheduler, TraceQuery(query_id=1))
    (answer,) = scheduler.sent
    assert [(s.tp, s.kind, s.requests, s.tokens) for s in answer.steps] == [
        (2, "prefill", 3, 96), (2, "decode", 3, 99), (2, "decode", 2, 70),
    ]  # fmt: skip
    assert all(step.seconds >= 0 for step in answer.steps)


def test_after_a_rest_a_step_counts_from_its_launch(scheduler, monkeypatch):
    """The loop finds nothing to run with overlap before the last step's results are in.

    That step took the time since the one before it, of which its launch knows nothing.
    The next step follows nobody.
    """
    now = iter([1.0, 1.5, 2.0, 3.0, 9.0, 9.5])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    counted, trace = [], StepTrace()
    scheduler.load.record_decode_step = lambda step: counted.append(step.at)
    for _ in range(2):
        trace.begin(batch(ForwardMode.DECODE, 1, seq_lens_sum=7))  # at 1.0 and 1.5
    trace.end(scheduler)  # at 2.0
    trace.mark_idle()
    trace.end(scheduler)  # at 3.0
    trace.mark_idle()
    trace.begin(batch(ForwardMode.DECODE, 1, seq_lens_sum=7))  # at 9.0
    trace.end(scheduler)
    trace.answer_query(scheduler, TraceQuery(query_id=1))
    assert [step.seconds for step in scheduler.sent[0].steps] == [1.0, 1.0, 0.5]
    assert counted == [3.0]


def test_the_copy_that_comes_with_the_results_knows_less():
    """The sums are taken at the launch for this reason; if it fails, the results would do."""
    copy = batch(ForwardMode.DECODE, 2, seq_lens_sum=70, extend_num_tokens=5).copy()
    assert copy.seq_lens_sum is None
    assert copy.extend_num_tokens == (None if adapter.FOLDER == "v0_5_12" else 5)
