"""A decode step that checks drafted tokens: a request has one row more for each of its drafts.

Row 0 gets the request's last token, row 1 the first draft, and so on; each attends to the request's KV and to the rows
before it, as if the drafts had been generated.  ``docs/speculation.md`` says why the output is that of plain decoding.

To SGLang it is a decode step of a larger batch: samplers, attention back ends and decode graphs are the same.  Its
results are processed token by token, as if there had been several steps, and the KV of what is left over is freed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from sglang_pat.host import adapter, kv
from sglang_pat.host.assign import assign
from sglang_pat.host.batches import count_attended, fill_rows, make_batch
from sglang_pat.host.fixes import penalties
from sglang_pat.host.requests import Req
from sglang_pat.messages import get_most_drafts
from sglang_pat.speculate.drafter import count_right
from sglang_pat.switch.transfer import upload

ROWS = (
    "next_token_logprobs", "next_token_top_logprobs_val", "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val", "next_token_token_ids_logprobs_idx", "hidden_states",
)  # fmt: skip
"""Fields of SGLang's ``LogitsProcessorOutput`` with an entry for each row of a step."""


def count_allowed(req: Req) -> int:
    """Most drafts that ``req`` may have.

    None where a token changes how the next one is sampled: the rows of a step are sampled all at once.
    """
    params = req.sampling_params
    waits = params.min_new_tokens > len(req.output_ids)
    special = req.custom_logit_processor is not None or getattr(req, "return_sampling_mask", False)
    if penalties.is_penalized(req) or waits or special or req.grammar is not None or req.finished():
        return 0
    limit, most_drafts = params.max_new_tokens, get_most_drafts(params)
    left = limit - len(req.output_ids) - 1  # pyright: ignore[reportOptionalOperand]: set by then
    return left if most_drafts is None else min(left, most_drafts)


def can_verify(batch: ScheduleBatch) -> bool:
    """Whether requests of ``batch``, which is about to run, may have drafts."""
    return batch.forward_mode.is_decode() and not batch.has_grammar


@dataclass(frozen=True)
class Checked:
    """A step that has been run and is to be processed (:func:`process`).

    Attributes:
        step: its batch, with a row for each draft, too; ``result``: SGLang's of it.
        reqs, drafts: the requests, and the drafts of each.
        slots: KV slots of the drafts, int64 ``[drafts of all requests]``.
        right: number of drafts of each request that were right.
    """

    step: ScheduleBatch
    result: Any
    reqs: list[Req]
    drafts: Sequence[Sequence[int]]
    slots: torch.Tensor
    right: list[int]


def check(
    scheduler: Any,
    batch: ScheduleBatch,
    drafts: Sequence[Sequence[int]],
    forward: Callable[[ScheduleBatch], Any],
) -> Checked | None:
    """Run one step of ``batch`` that checks ``drafts``, after which the batch is as far as those that were right.

    Args:
        batch: about to decode.
        drafts: tokens for each request, none for some.
        forward: runs a batch.

    Returns:
        What is to be processed; None, and nothing has been done, if there is no KV for all drafts.
    """
    count = sum(map(len, drafts))
    evict_from_tree_cache(scheduler.tree_cache, count)
    slots = scheduler.token_to_kv_pool_allocator.alloc(count)  # int64 [count]
    if slots is None:
        return None
    step = _expand(scheduler, batch, drafts, slots)
    result = forward(step)
    if result.copy_done is not None:
        result.copy_done.synchronize()
    sampled = iter(result.next_token_ids.tolist())
    tokens = [[next(sampled) for _ in range(len(drafted) + 1)] for drafted in drafts]
    right = [count_right(drafted, row) for drafted, row in zip(drafts, tokens, strict=True)]
    _advance(scheduler, batch, right, [row[count] for row, count in zip(tokens, right, strict=True)])
    return Checked(step, result, batch.reqs, drafts, slots, right)


def _expand(
    scheduler: Any, batch: ScheduleBatch, drafts: Sequence[Sequence[int]], slots: torch.Tensor
) -> ScheduleBatch:
    """The step's batch, with the rows of each request one after the other; its drafts get ``slots``."""
    counts = [len(drafted) + 1 for drafted in drafts]
    reqs = [req for req, count in zip(batch.reqs, counts, strict=True) for _ in range(count)]
    behind = [j for count in counts for j in range(count)]
    lengths = [kv.count_kv(req) + j for req, j in zip(reqs, behind, strict=True)]
    tokens = [token for req, row in zip(batch.reqs, drafts, strict=True) for token in (req.output_ids[-1], *row)]
    step = make_batch(scheduler, reqs, scheduler.enable_overlap)
    last = fill_rows(step, lengths, tokens)
    # By numbers: a mask would have the host wait for the device.
    first, drafted = (
        upload([row for row, j in enumerate(behind) if (j > 0) == later], torch.int64, batch.device)
        for later in (False, True)
    )
    where = torch.empty_like(last)
    where[first], where[drafted] = batch.out_cache_loc.to(torch.int64), slots
    line, at = step.req_pool_indices[drafted], step.seq_lens[drafted] - 1
    scheduler.req_to_token_pool.write((line, at), slots.to(torch.int32))
    assign(
        step,
        forward_mode=batch.forward_mode,
        input_ids=last,
        out_cache_loc=where.to(batch.out_cache_loc.dtype),
        sampling_info=penalties.make_sampling_info(step, decode=False),
    )
    return step


def _advance(scheduler: Any, batch: ScheduleBatch, right: Sequence[int], last: Sequence[int]) -> None:
    """Have ``batch`` go on after its ``last`` tokens, with as many more tokens of KV as drafts were ``right``."""
    more, tokens = upload([right, last], torch.int64, batch.device).unbind()
    assign(
        batch,
        seq_lens=batch.seq_lens + more,
        seq_lens_cpu=batch.seq_lens_cpu + torch.tensor(right, dtype=torch.int64),
        orig_seq_lens=batch.orig_seq_lens + more.to(batch.orig_seq_lens.dtype),
    )
    assign(batch, seq_lens_sum=count_attended(batch))  # SGLang 0.5.23 sums up in each step
    adapter.rank.set_last_tokens(scheduler, batch, tokens)


def process(scheduler: Any, checked: Checked, process_step: Callable[[ScheduleBatch, Any], None]) -> None:
    """Process the first token of each request, then the second of those that have one and go on, and so on.

    Args:
        process_step: processes the results of a plain step.
    """
    reqs, first, behind = checked.reqs, [], 0
    for drafted in checked.drafts:
        first.append(behind)
        behind += len(drafted) + 1
    used = [0] * len(reqs)
    for row in range(max(checked.right) + 1):
        chosen = [i for i, req in enumerate(reqs) if checked.right[i] >= row and not req.finished()]
        if not chosen:
            break
        part = checked.step.copy()
        assign(part, reqs=[reqs[i] for i in chosen])
        for i in chosen:
            used[i] = row + 1
            if row:
                kv.add_committed(reqs[i])
        process_step(part, select_rows(checked.result, [first[i] + row for i in chosen], row == 0))
    _free_unused(scheduler, checked, used)


def select_rows(result: Any, rows: list[int], whole: bool) -> Any:
    """What ``result`` has of these ``rows``; what it has of the ``whole`` step goes with one of the parts."""
    logits: LogitsProcessorOutput | None = result.logits_output
    if logits is not None:
        named = {name: _select(value, rows) for name in ROWS if (value := getattr(logits, name)) is not None}
        if logits.customized_info:
            named["customized_info"] = {key: _select(values, rows) for key, values in logits.customized_info.items()}
        logits = dataclasses.replace(logits, **named)
    output = result.routed_experts_output if whole else None
    ids = _select(result.next_token_ids, rows)
    return dataclasses.replace(result, logits_output=logits, next_token_ids=ids, routed_experts_output=output)


def _select(values: Any, rows: list[int]) -> Any:
    if isinstance(values, torch.Tensor):
        return values[torch.tensor(rows, device=values.device)]
    return [values[row] for row in rows] if values else values


def _free_unused(scheduler: Any, checked: Checked, used: Sequence[int]) -> None:
    """Free the slots of all drafts but those whose rows are ``used``, which are the requests' own now."""
    unused, at = [], 0
    for drafted, rows in zip(checked.drafts, used, strict=True):
        unused += range(at + max(rows - 1, 0), at + len(drafted))
        at += len(drafted)
    if unused:
        scheduler.token_to_kv_pool_allocator.free(checked.slots[upload(unused, torch.int64, checked.slots.device)])
