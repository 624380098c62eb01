"""Outputs of a request that asks for no token, and of one that is aborted while it waits.

Upstream: ``docs/upstream/scores_without_tokens.md``, ``docs/upstream/aborted_while_waiting.md``,
``docs/upstream/experts_of_waiting.md``
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

from sglang_pat.host import adapter, kv
from sglang_pat.host.assign import assign
from sglang_pat.rank import degrees


def drop_scores_without_tokens(reqs: list[Req]) -> None:
    """Drop the logprobs of requests that ask for no token: beside others that do, SGLang draws one and keeps its."""
    for req in reqs:
        if req.finished_len == 0 and req.return_logprob:
            assign(adapter.rank.get_logprobs(req), output_token_logprobs_val=[], output_token_logprobs_idx=[])


def abort(abort: AbortReq, req: Req) -> None:
    """End ``req``, which waits, as ``abort`` says."""
    reason: dict[str, Any] = abort.finished_reason or {}
    message = reason.get("message") or abort.abort_message or "Abort in waiting queue"
    status: HTTPStatus | None = reason.get("status_code")
    assign(req, finished_reason=FINISH_ABORT(message, status))
    req.time_stats.set_completion_time()
    degrees.end(req)


def read_experts(req: Req, slots: torch.Tensor) -> torch.Tensor | None:
    """Experts that the client of ``req`` asked for, ``[tokens, layers, experts per token]``; None if for none.

    Args:
        slots: slots of its KV, ``[tokens - 1]`` or more.
    """
    if not req.return_routed_experts or (capturer := get_global_experts_capturer()) is None:
        return None
    slots = slots[_find_first(req) : req.seqlen - 1].cpu()
    return capturer.host_cache.buffer[slots]  # pyright: ignore[reportOptionalSubscript]


def _find_first(req: Req) -> int:
    """The first token whose experts the client of ``req`` asked for."""
    return min(req.routed_experts_start_len, req.seqlen - 1)


def keep_experts() -> None:
    """Let requests that are retracted take the experts of their tokens along.

    SGLang forgets them with their KV: when such a request is aborted before it has KV again, its answer has none.
    """
    owner = adapter.rank.RELEASER
    release = owner.release_req
    if hasattr(release, "pat_mended"):
        return

    def release_req(*args: Any, **named: Any) -> Any:
        req, pool = adapter.rank.find_released(*args, **named)
        kept = read_experts(req, pool.req_to_token[kv.get_line(req)])
        result = release(*args, **named)
        req.pat_experts = kept
        return result

    release_req.pat_mended = True
    assign(owner, release_req=release_req)


def collect_experts(req: Req, slots: torch.Tensor) -> None:
    """Attach the experts of its tokens to ``req``, which waits and is aborted; none if some are not known.

    Args:
        slots: slots of its KV, which may wait in the radix tree, ``[tokens]``.
    """
    here = len(slots) == req.seqlen - 1
    rows = read_experts(req, slots) if here else getattr(req, "pat_experts", None)
    if rows is not None and len(rows) == req.seqlen - 1 - _find_first(req):
        assign(req, routed_experts=rows.int())  # as clients read it
