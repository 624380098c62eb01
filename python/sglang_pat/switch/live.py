"""The live requests of a rank: taken out of its loop, listed, counted, or given back to its queue.

:func:`drain` is the first step of a pause and :func:`check` the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pat.kernels.transfer import download, upload
from sglang_pat.switch import requests

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler


def drain(scheduler: SwitchingScheduler) -> None:
    """Finish the step in flight and leave all decoding requests in ``running_batch``.

    Keeps everything valid, so that an aborted switch just goes on.
    """
    while scheduler.enable_overlap and scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    last = scheduler.last_batch
    if last is not None and last.forward_mode.is_extend():
        last.filter_batch(chunked_req_to_exclude=[r for r in (scheduler.chunked_req, last.chunked_req) if r])
        if not last.is_empty():
            if scheduler.running_batch.is_empty():
                scheduler.running_batch = last
            else:
                scheduler.running_batch.merge_batch(last)
    scheduler.last_batch = scheduler.cur_batch = None
    scheduler.running_batch.filter_batch()
    # SGLang looks for room again where its own code shrinks this batch, and never again if it is empty.
    scheduler.running_batch.batch_is_full = False
    while scheduler.return_health_check_ipcs:
        scheduler.maybe_send_health_check_signal()


def drain_ended(scheduler: SwitchingScheduler) -> None:
    """Let go of the requests in a batch if all have ended in the last step.

    They have been answered, and SGLang would count them up to its next turn: what is to come when nothing runs would
    fail before.
    """
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    if any(batch.reqs for batch in batches) and all(req.finished() for batch in batches for req in batch.reqs):
        drain(scheduler)


def idle_everywhere(scheduler: SwitchingScheduler) -> bool:
    """Whether no rank of the engine has a request; all of them call this."""
    idle = torch.tensor([int(scheduler.is_fully_idle())])
    dist.all_reduce(idle, dist.ReduceOp.MIN, group=scheduler.layouts.runner.groups.world)
    return bool(idle.item())


def requests_of(scheduler: SwitchingScheduler) -> tuple[list[Req], list[Req]]:
    """``(decoding, waiting)`` after :func:`drain`; a half-prefilled request counts as waiting."""
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    waiting = chunked + scheduler.waiting_queue + scheduler.grammar_manager.grammar_queue
    return list(scheduler.running_batch.reqs), waiting


def with_kv(scheduler: SwitchingScheduler) -> tuple[list[Req], list[Req], list[np.ndarray]]:
    """``(live, waiting, rows)`` after :func:`drain`: requests that have KV, those that decode first; the others.

    ``rows``: KV slots of the tokens of each live one, int64 ``[tokens]``; the last token has none yet.  Of those that
    do not decode some may have fewer: only some pieces of a prompt are computed, or some KV was evicted.
    """
    decoding, waiting = requests_of(scheduler)
    parked = _parked(scheduler)
    there = {id(req) for req, _ in parked}
    rows = kv_rows(scheduler, decoding, [slots for _, slots in parked])
    return decoding + [req for req, _ in parked], [req for req in waiting if id(req) not in there], rows


def have_decoded(scheduler: SwitchingScheduler) -> list[Req]:
    """Those that decoded and wait now: parked by a switch, or retracted."""
    return [req for req in scheduler.waiting_queue if req.output_ids]


def keeps_pieces(scheduler: SwitchingScheduler) -> bool:
    """Whether what is computed of a prompt goes over: KV moves, and there is a tree to wait in."""
    tree = scheduler.tree_cache
    return scheduler.adaptive.kv != "recompute" and not (tree.is_chunk_cache() or tree.disable)


def _parked(scheduler: SwitchingScheduler) -> list[tuple[Req, torch.Tensor]]:
    """Requests that wait and have KV, with its slots: those that decoded first, then prompts in pieces.

    An earlier switch has left it in the radix tree (``adopt``), where some may have been lost to others that decode;
    the prompt whose pieces are being computed holds its own.  Who has decoded has none in a pause by a client: one that
    has retracted all requests promises that no KV is in use, so that weights can be updated and the tree emptied.
    """
    tree = scheduler.tree_cache
    if tree.is_chunk_cache() or tree.disable:
        return []
    chunked = scheduler.chunked_req
    waiting = [] if scheduler._paused_by_client else have_decoded(scheduler)
    waiting += [req for req in scheduler.waiting_queue if req.extend_batch_idx and not req.output_ids]
    found: list[tuple[Req, torch.Tensor]] = []
    for req in waiting:
        key = RadixKey((req.origin_input_ids + req.output_ids)[:-1], req.extra_key)
        slots = tree.match_prefix(MatchPrefixParams(key=key)).device_indices
        if len(slots):
            found.append((req, slots))
    if chunked is not None:
        table = scheduler.req_to_token_pool.req_to_token
        found.append((chunked, table[chunked.req_pool_idx, : chunked.kv_committed_len]))
    return found


def kv_rows(scheduler: SwitchingScheduler, decoding: list[Req], parked: list[torch.Tensor]) -> list[np.ndarray]:
    """KV slots of the tokens of each, int64 ``[tokens]``; one read of the device for each of the two."""
    rows: list[np.ndarray] = []
    if decoding:
        lengths = [req.kv_committed_len for req in decoding]
        places = upload([req.req_pool_idx for req in decoding], torch.int64, scheduler.device)
        table = download(scheduler.req_to_token_pool.req_to_token[places, : max(lengths)])
        rows += [row[:length].astype(np.int64) for row, length in zip(table, lengths, strict=True)]
    if parked:
        ends = np.cumsum([len(slots) for slots in parked])
        rows += np.split(download(torch.cat(parked)).astype(np.int64), ends[:-1])
    return rows


def recompute(scheduler: SwitchingScheduler) -> None:
    """Send every request back to the queue as tokens, and empty the pools: their KV may have been overwritten."""
    decoding, waiting = requests_of(scheduler)
    for req in decoding + ([scheduler.chunked_req] if scheduler.chunked_req is not None else []):
        req.req_pool_idx = None
        req.reset_for_retract()
        requests.forget_pieces(req)
    grammar_queue = scheduler.grammar_manager.grammar_queue
    scheduler.clear_pools()
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.chunked_req, scheduler._chunked_req_scheduled_last_iter = None, False
    scheduler.waiting_queue = decoding + [req for req in waiting if req not in grammar_queue]


def check(scheduler: SwitchingScheduler) -> None:
    """Raise ``RuntimeError`` naming all terms if KV slots or request slots do not add up."""
    reqs = scheduler.running_batch.reqs
    held = sum(req.kv_allocated_len - req.cache_protected_len for req in reqs)
    leak, message = scheduler._check_full_pool(scheduler.get_pool_stats(), uncached=held)
    if leak:
        raise RuntimeError(f"KV slots do not add up after the switch: {message}")
    free, used, size = scheduler.req_to_token_pool.available_size(), len(reqs), scheduler.req_to_token_pool.size
    if free + used != size:
        raise RuntimeError(f"request slots do not add up after the switch: {free=} + {used=} != {size=}")
