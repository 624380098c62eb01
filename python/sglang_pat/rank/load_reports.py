"""Reports of a leader to the coordinator: load (:class:`LoadReporter`), and a trace of steps (:class:`StepTrace`)."""

from __future__ import annotations

import time
import zlib
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from sglang_pat.host import batches, kv, loop
from sglang_pat.host import requests as host
from sglang_pat.host.batches import ScheduleBatch
from sglang_pat.host.requests import Req
from sglang_pat.messages import (
    ROUND_MARK,
    Decoded,
    Finished,
    LoadReport,
    RankTrace,
    Running,
    Step,
    StepCounts,
    TraceQuery,
    count_prefix_tokens,
    get_length_limit,
)

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

REPORT_INTERVAL_STEPS = 32
"""Most steps between two load reports."""

TRACE_STEPS = 16384
"""Number of steps kept for :class:`StepTrace`; older ones are forgotten."""


def register(req: Req) -> None:
    """Note on a new request what reports say of it.

    That is its length limit, how much of its response came with the prompt, and the family of the prompt before that.
    """
    prompt, params = req.pat_prompt, host.get_sampling_params(req)
    limit = get_length_limit(params)
    assert limit is not None, "SGLang has set one"
    req.pat_limit = limit
    req.pat_since = min(count_prefix_tokens(params), len(prompt))
    req.pat_family = zlib.crc32(prompt[: len(prompt) - req.pat_since] if req.pat_since else prompt)


class LoadReporter:
    """Sender of a :class:`LoadReport` when the load has changed, or after :data:`REPORT_INTERVAL_STEPS` steps."""

    def __init__(self, scheduler: SwitchingScheduler) -> None:
        self._scheduler = scheduler
        self.received = 0
        """Number of generation requests taken from the input socket so far."""
        self.retracted = 0
        """Number of requests put back into the queue for want of KV since the last report, while this rank led."""
        self._counts = StepCounts()
        self._finished: list[Finished] = []
        self._decoded: list[Step] = []
        """Decode steps since the last report that followed another one."""
        self._last: tuple[int, ...] | None = None
        self._steps = 0

    def force_next_report(self) -> None:
        """Have the next look at the load reported in any case."""
        self._last = None

    def reset_for_new_group(self) -> None:
        """Begin anew in another group: steps that were not reported are not of its layout."""
        self.force_next_report()
        self._decoded = []

    def record_finished_requests(self, reqs: list[Req]) -> None:
        """Record which of ``reqs`` have finished, before outputs go out: SGLang marks them as sent then."""
        for req in reqs:
            if host.is_answer_due(req):
                try:
                    self._account(req)
                except Exception as error:
                    self._scheduler.dropped.note("Finished", error)

    def _account(self, req: Req) -> None:
        length = req.pat_since + len(host.get_output(req))
        cut = host.is_cut_off(req, full=length >= req.pat_limit)
        self._finished.append(Finished(length=length, family=req.pat_family, cut=cut, since=req.pat_since))

    def record_decode_step(self, step: Step) -> None:
        """Record a decode step that followed another one."""
        self._decoded.append(step)

    def count(self, counts: StepCounts) -> None:
        """Add ``counts`` to those of the next report."""
        self._counts = self._counts.add(counts)

    def report_if_due(self, batch: ScheduleBatch | None) -> None:
        """Report if due.  ``batch`` is about to run."""
        scheduler = self._scheduler
        running, queued = loop.list_running_with(scheduler, batch), loop.count_waiting(scheduler)
        self._steps += batch is not None
        # ``received``: a request may have come and gone since the last look.
        load = (len(running), queued, scheduler.layouts.weight_version, self.received)
        if load == self._last and self._steps < REPORT_INTERVAL_STEPS and not self._finished:
            return
        self._last, self._steps = load, 0
        self.send(running)

    def report_held(self) -> None:
        """Report in any case: the replica holds between two steps.  What the last step prefilled is about to decode."""
        self._last = None
        self.send([req for req in loop.list_running_with_last(self._scheduler) if not host.has_ended(req)])

    def send(self, running: list[Req]) -> None:
        """Report ``running``, and all requests that wait."""
        _, waiting = loop.list_requests(self._scheduler)
        try:
            self._send(running, waiting, running + waiting)
        except Exception as error:
            self._scheduler.dropped.note("LoadReport", error)
            # What the coordinator routes by it has to know; policies wait for a report with the requests in it.
            self._finished = []
            self._send(running, waiting, [])

    def _send(self, running: list[Req], waiting: list[Req], listed: list[Req]) -> None:
        scheduler = self._scheduler
        kv_used, kv_total = kv.count_used_slots(scheduler)
        scheduler.channel.send(
            LoadReport(
                rank=scheduler.rank,
                tp=scheduler.layouts.layout.tp,
                stride=scheduler.layouts.layout.stride,
                received=self.received,
                running=len(running),
                waiting=len(waiting),
                tokens=loop.count_decoding_tokens(scheduler) if running else 0,
                kv_used=kv_used,
                kv_total=kv_total,
                retracted=self.retracted,
                weight_updates=scheduler.layouts.weight_version,
                requests=[_describe_request(req) for req in listed],
                rounds=_list_rounds(listed),
                finished=self._finished,
                kv_totals=scheduler.layouts.kv_totals,
                decoded=_sum_steps(self._decoded),
                counts=self._counts,
                chances=scheduler.speculation.chances,
                draft_seconds=scheduler.speculation.draft_seconds,
            )
        )
        self._finished, self.retracted, self._decoded, self._counts = [], 0, [], StepCounts()


def _sum_steps(steps: list[Step]) -> Decoded:
    """Add up ``steps``, each with the medians of their times and batches: a pause of the machine is no property of the
    layout, and a step with drafts has more rows than one without."""
    if not steps:
        return Decoded()
    values = zip(*((step.seconds, step.requests, step.tokens) for step in steps), strict=True)
    seconds, requests, tokens = (len(steps) * median(of_steps) for of_steps in values)
    return Decoded(len(steps), seconds, round(requests), round(tokens))


def _list_rounds(reqs: list[Req]) -> list[str]:
    """Names of the rounds of ``reqs``, each once."""
    return sorted({name for req in reqs if (name := getattr(req.pat_request, ROUND_MARK, ""))})


def _describe_request(req: Req) -> Running:
    since = req.pat_since
    prompt, output = len(host.get_prompt(req)), len(host.get_output(req))
    return Running(prompt - since, output + since, req.pat_limit, req.pat_family)


class StepTrace:
    """The last :data:`TRACE_STEPS` steps that this rank has led, and how long each took."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=TRACE_STEPS)
        self._launched: deque[tuple[float, str, int, int]] = deque()
        self._last_end: float | None = None
        self._after: tuple[int, str] | None = None
        """Degree and kind of the last step; None after a break."""

    def mark_idle(self) -> None:
        """Note that nothing runs: the next step's time is its own.

        With overlap scheduling the last step's results are still to come, and that one did follow another.
        """
        if not self._launched:
            self._last_end = self._after = None

    def begin(self, batch: ScheduleBatch) -> None:
        """Note that a step is launched.

        With overlap scheduling the next one is launched before its results are in, and its results come with a copy of
        the batch that knows less.
        """
        kind = "decode" if batches.is_decode(batch) else "prefill"
        tokens = batches.count_step_tokens(batch)
        self._launched.append((time.monotonic(), kind, len(batches.list_batch(batch)), tokens))

    def end(self, scheduler: SwitchingScheduler) -> None:
        """Record the oldest step launched, whose results are in.

        Its time runs from the end of the one before, scheduling included.
        """
        now = time.monotonic()
        begun, kind, requests, tokens = self._launched.popleft()
        seconds = now - (begun if self._last_end is None else self._last_end)
        self._last_end = now
        tp = scheduler.layouts.layout.tp
        before, self._after = self._after, (tp, kind)
        if scheduler.is_leader:
            step = Step(now, seconds, tp, kind, requests, tokens)
            self._steps.append(step)
            if kind == "decode":
                scheduler.load.count(StepCounts(decode_steps=1))
                if before == self._after:
                    scheduler.load.record_decode_step(step)

    def answer_query(self, scheduler: SwitchingScheduler, query: TraceQuery) -> None:
        """Send the steps since the last query."""
        steps, self._steps = list(self._steps), deque(maxlen=TRACE_STEPS)
        scheduler.channel.send(RankTrace(rank=scheduler.rank, query_id=query.query_id, steps=steps))
