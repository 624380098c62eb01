"""SGLang's event loop: the requests that it holds, the step in flight, and what it counts."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.host.batches import PROCESSED, count_attended
from sglang_pat.host.requests import Req

# -- the requests ------------------------------------------------------------------------------------------------------


def drain(scheduler: Any) -> None:
    """Finish the step in flight and leave all decoding requests in ``running_batch``.

    Keeps everything valid, so that an aborted switch just goes on.
    """
    while scheduler.enable_overlap and scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    adapter.rank.settle(scheduler)
    last = scheduler.last_batch
    if last is not None and last.forward_mode.is_extend():
        last.filter_batch([r for r in (scheduler.chunked_req, last.chunked_req) if r])
        if not last.is_empty():
            if scheduler.running_batch.is_empty():
                assign(scheduler, running_batch=last)
            else:
                scheduler.running_batch.merge_batch(last)
    assign(scheduler, last_batch=None, **{adapter.rank.CURRENT_BATCH: None})
    scheduler.running_batch.filter_batch()
    # SGLang looks for room again where its own code shrinks this batch, and never again if it is empty.
    assign(scheduler.running_batch, batch_is_full=False)
    while scheduler.return_health_check_ipcs:
        scheduler.maybe_send_health_check_signal()


def process_pending(scheduler: Any) -> None:
    """Process results that are to come, of steps that were launched ahead (overlap scheduling).

    The loop pops one result for each: it gets ``PROCESSED`` in their place.
    """
    if scheduler.enable_overlap:
        for number, (batch, result) in enumerate(scheduler.result_queue):
            scheduler.result_queue[number] = batch, PROCESSED
            scheduler.process_batch_result(batch, result)


def drop_ended_batch(scheduler: Any) -> None:
    """Let go of the requests in a batch if all have ended in the last step.

    They have been answered, and SGLang would count them up to its next turn: what is to come when nothing runs would
    fail before.
    """
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    if any(batch.reqs for batch in batches) and all(req.finished() for batch in batches for req in batch.reqs):
        drain(scheduler)


def is_idle(scheduler: Any) -> bool:
    """Whether the scheduler has no request."""
    return scheduler.is_fully_idle()


def is_paused(scheduler: Any) -> bool:
    """Whether no step may begin: a client has paused the scheduler, or it holds."""
    return scheduler._engine_paused


def list_running(scheduler: Any) -> list[Req]:
    """Requests that decode, after :func:`drain`; before it, without those that the last step has prefilled."""
    return scheduler.running_batch.reqs


def list_queued(scheduler: Any) -> list[Req]:
    """Requests that wait for a prefill."""
    return scheduler.waiting_queue


def list_requests(scheduler: Any) -> tuple[list[Req], list[Req]]:
    """``(decoding, waiting)`` after :func:`drain`; a half-prefilled request counts as waiting."""
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    waiting = chunked + scheduler.waiting_queue + scheduler.grammar_manager.grammar_queue
    return list(scheduler.running_batch.reqs), waiting


def count_waiting(scheduler: Any) -> int:
    """Number of requests that wait, as :func:`list_requests` has them; asked in each step, so no list is made."""
    compiling = scheduler.grammar_manager.grammar_queue
    return len(scheduler.waiting_queue) + len(compiling) + (scheduler.chunked_req is not None)


def list_running_with(scheduler: Any, batch: ScheduleBatch | None) -> list[Req]:
    """Requests that run, with those of ``batch``, which is about to run, but for one in the middle of its prefill."""
    running = scheduler.running_batch.reqs
    if batch is not None and batch is not scheduler.running_batch:
        running = running + [req for req in batch.reqs if req is not scheduler.chunked_req]
    return running


def list_running_with_last(scheduler: Any) -> list[Req]:
    """Requests that run between two steps; what the last one prefilled is about to decode."""
    return list({id(req): req for req in list_running_with(scheduler, scheduler.last_batch)}.values())


def count_decoding_tokens(scheduler: Any) -> int:
    """Number of tokens that the next decode step attends to."""
    decoding = scheduler.running_batch
    return count_attended(decoding) if decoding.reqs else 0


def count_running(scheduler: Any) -> int:
    """Number of requests that run, with those that the last step has prefilled."""
    last, running = scheduler.last_batch, scheduler.running_batch
    return len(running.reqs) + (len(last.reqs) if last is not None and last is not running else 0)


def has_grammar(scheduler: Any) -> bool:
    """Whether one of the requests that decode has a grammar."""
    return scheduler.running_batch.has_grammar


def get_chunked(scheduler: Any) -> Req | None:
    """The request whose prompt is being computed in pieces."""
    return scheduler.chunked_req


def get_chunk_size(scheduler: Any) -> int:
    """Most tokens of a piece of a prompt; 0 where prompts are computed whole."""
    return scheduler.chunked_prefill_size or 0


def get_max_running(scheduler: Any) -> int:
    """Most requests that decode at once."""
    return scheduler.max_running_requests


def set_requests(scheduler: Any, queued: list[Req], compiling: list[Req]) -> None:
    """Make these all requests of the scheduler: none runs, and none is in the middle of a prefill.

    Args:
        queued, compiling: requests that wait for a prefill, and for their grammar.
    """
    assign(
        scheduler,
        chunked_req=None,
        running_batch=ScheduleBatch(reqs=[], batch_is_full=False),
    )
    adapter.rank.forget_chunk(scheduler)
    set_waiting(scheduler, queued, compiling)


def set_waiting(scheduler: Any, queued: list[Req], compiling: list[Req]) -> None:
    """Make these the lists of requests that wait for a prefill, and for their grammar."""
    assign(scheduler, waiting_queue=queued)
    assign(scheduler.grammar_manager, grammar_queue=compiling)


def set_running(scheduler: Any, batch: ScheduleBatch) -> None:
    """Make ``batch`` the one that decodes next."""
    assign(scheduler, running_batch=batch)


def list_compiling(scheduler: Any) -> list[Req]:
    """Requests that wait for their grammar."""
    return scheduler.grammar_manager.grammar_queue


# -- what the loop counts ----------------------------------------------------------------------------------------------


def read_counters(scheduler: Any) -> dict[str, Any]:
    """The values of the adapter's ``COUNTERS`` that this scheduler has, which a rank takes over from its new leader.

    Ranks of one TP group run the same scheduler side by side: where two of them differ in a counter or an order, one
    waits in a broadcast and the other in an all-reduce, for ever.  Ranks that come together from different groups
    differ in whatever has counted their steps or read their clocks.  What else must be equal is made anew by
    ``AdaptiveScheduler.enter_layout`` and ``switch/install.py``.
    """
    return {path: value for path in adapter.rank.COUNTERS if (value := find(scheduler, path)) is not None}


def write_counters(scheduler: Any, values: dict[str, Any]) -> None:
    """Write the values that :func:`read_counters` has read on the leader."""
    moved = values["forward_ct"] - scheduler.forward_ct
    marks = {path: find(scheduler, path) for path in adapter.rank.STEP_MARKS}
    values = {path: mark + moved for path, mark in marks.items() if mark is not None} | values
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        assign(find(scheduler, owner) if owner else scheduler, **{name: value})


def find(root: Any, path: str) -> Any:
    """The attribute of ``root`` at this dotted path, or None."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root
