"""SGLang's event loop, which passes batches on, and counts prefilled tokens for one of its policies."""

from __future__ import annotations

from typing import Any

CURRENT = "cur_batch_for_debug"
"""Attribute of the scheduler with the batch that runs."""

COUNTERS = (
    "forward_ct", "recv_skipper._counter", "processed_tokens_counter", "_prefill_decode_interval_remaining",
    "policy._waiting_prefix_refresh_calls",
)  # fmt: skip
"""Attributes of the scheduler, dotted, that count steps and that a rank takes over from its new leader."""

STEP_MARKS = ("profiler_manager.profiler_start_forward_ct", "profiler_manager.profiler_target_forward_ct")
"""Attributes counted in steps of this rank, dotted, which move along when ``forward_ct`` does."""


def leave_out(batch: Any, reqs: list[Any]) -> None:
    """Drop from a batch the requests that have ended, and ``reqs``."""
    batch.filter_batch(reqs_to_exclude=reqs)


def settle(scheduler: Any) -> None:
    """End the prompt in pieces whose abort SGLang has put off to the next step, which other ranks may not take."""
    scheduler.process_pending_chunked_abort()


def forget_chunk(scheduler: Any) -> None:
    """Do nothing: SGLang asks the request what the last step did."""
