"""Outputs: SGLang lays out hidden states, routed experts and logprobs of given tokens by request."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_pat.host.assign import assign
from sglang_pat.host.fixes.outputs import read_experts


def keep_routed_experts() -> None:
    """Let requests that are retracted take the experts of their tokens along.

    SGLang forgets them with their KV: when such a request is aborted before it has KV again, its answer has none.
    """
    release = schedule_batch.release_req
    if hasattr(release, "pat_mended"):
        return

    def release_req(*, req: Req, req_to_token_pool: ReqToTokenPool, **named: Any) -> bool:
        kept = read_experts(req, req_to_token_pool)
        resumable = release(req=req, req_to_token_pool=req_to_token_pool, **named)
        req.pat_experts = kept
        return resumable

    release_req.pat_mended = True
    assign(schedule_batch, release_req=release_req)
