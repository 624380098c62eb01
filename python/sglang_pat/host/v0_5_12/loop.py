"""SGLang's event loop, which keeps the batch that runs in ``cur_batch``."""

from __future__ import annotations

from typing import Any

from sglang_pat.host.assign import assign

CURRENT = "cur_batch"
"""Attribute of the scheduler with the batch that runs."""

COUNTERS = ("forward_ct", "recv_skipper._counter")
"""Attributes of the scheduler, dotted, that count steps and that a rank takes over from its new leader."""

STEP_MARKS = ("profiler_start_forward_ct", "profiler_target_forward_ct")
"""Attributes counted in steps of this rank, dotted, which move along when ``forward_ct`` does."""


def leave_out(batch: Any, reqs: list[Any]) -> None:
    """Drop from a batch the requests that have ended, and ``reqs``."""
    batch.filter_batch(chunked_req_to_exclude=reqs)


def settle(scheduler: Any) -> None:
    """Do nothing: nothing is put off to the next step."""


def forget_chunk(scheduler: Any) -> None:
    """Forget what the last step did with a prompt in pieces, of which there is none now."""
    assign(scheduler, _chunked_req_scheduled_last_iter=False)
