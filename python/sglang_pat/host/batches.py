"""SGLang's ``ScheduleBatch``: made of requests whose KV is in place, and run for one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.host import adapter, kv
from sglang_pat.host.assign import assign
from sglang_pat.host.fixes import penalties
from sglang_pat.host.requests import Req
from sglang_pat.switch.transfer import upload

__all__ = ["ScheduleBatch"]

PROCESSED = GenerationBatchResult()
"""Result of a step that has been processed already, in place of the step's own."""


def make_decode_batch(scheduler: Any, reqs: list[Req]) -> ScheduleBatch:
    """A batch about to decode, of requests whose KV is in place."""
    batch = make_batch(scheduler, reqs, scheduler.enable_overlap)
    last = fill_rows(batch, [kv.count_kv(req) for req in reqs], [req.output_ids[-1] for req in reqs])
    adapter.rank.set_last_tokens(scheduler, batch, last)
    assign(batch, sampling_info=penalties.make_sampling_info(batch, decode=True))
    return batch


def fill_rows(batch: ScheduleBatch, lengths: list[int], tokens: list[int]) -> torch.Tensor:
    """Set what a decode step reads of each row of ``batch``, but for the slots that it writes and the sampling.

    Args:
        lengths: number of tokens that each row attends to; ``tokens``: the last ones.

    Returns:
        ``tokens`` on the device, int64 ``[rows]``.
    """
    reqs = batch.reqs
    lines = [kv.get_line(req) for req in reqs]
    places, seq_lens, last = upload([lines, lengths, tokens], torch.int64, batch.device).unbind()
    adapter.rank.set_places(batch, places, lines)
    assign(
        batch,
        seq_lens=seq_lens,
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        orig_seq_lens=seq_lens.to(torch.int32),
        seq_lens_sum=sum(lengths),
        multimodal_inputs=[None] * len(reqs),
    )
    if batch.return_logprob:
        records = [adapter.rank.get_logprobs(req) for req in reqs]
        assign(
            batch,
            top_logprobs_nums=[logprobs.top_logprobs_num for logprobs in records],
            token_ids_logprobs=[logprobs.token_ids_logprob for logprobs in records],
        )
    return last


def make_batch(scheduler: Any, reqs: list[Req], overlap: bool) -> ScheduleBatch:
    """A batch of ``reqs`` in the scheduler's pools, of which nothing else is set."""
    return ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        overlap,
        scheduler.spec_algorithm,
    )


def get_vocab_size(scheduler: Any) -> int:
    return scheduler.model_config.vocab_size


# -- steps outside the loop --------------------------------------------------------------------------------------------


def make_prefill(scheduler: Any, prompts: Sequence[list[int]]) -> ScheduleBatch:
    """A batch about to prefill made-up ``prompts`` (token ids), in empty pools."""
    greedy = SamplingParams(max_new_tokens=1, temperature=0)
    reqs = [Req(f"check {i}", "", adapter.rank.make_tokens(prompt), greedy) for i, prompt in enumerate(prompts)]
    for req in reqs:
        adapter.rank.compute_whole(req)
    batch = make_batch(scheduler, reqs, False)
    batch.prepare_for_extend()
    return batch


def go_on_with(scheduler: Any, batch: ScheduleBatch, tokens: Sequence[int]) -> None:
    """Have a batch that was prefilled decode next, where each request goes on with one of ``tokens``."""
    adapter.rank.set_last_tokens(scheduler, batch, torch.tensor(tokens, device=scheduler.device))
    batch.prepare_for_decode()


def compute_logits(scheduler: Any, batch: ScheduleBatch) -> torch.Tensor:
    """Run one step and return the logits of the next token, ``[requests, vocabulary]``."""
    return adapter.rank.compute_logits(scheduler, batch).clone()  # a graph's next replay writes there


# -- what others read --------------------------------------------------------------------------------------------------


def list_batch(batch: ScheduleBatch) -> list[Req]:
    return batch.reqs


def is_decode(batch: ScheduleBatch) -> bool:
    return batch.forward_mode.is_decode()


def count_step_tokens(batch: ScheduleBatch) -> int:
    """Number of tokens that a step attends to, if it decodes, or computes, if it prefills."""
    return count_attended(batch) if is_decode(batch) else int(batch.extend_num_tokens or 0)


def count_attended(batch: ScheduleBatch) -> int:
    """Number of tokens that a decode step of ``batch`` attends to."""
    return 0 if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum())


def read_sampled_tokens(batch: ScheduleBatch, result: Any) -> tuple[list[str], list[int]] | None:
    """Names of a step's requests, and the token that each got; None if the step samples none.  Waits for the device."""
    token_ids = getattr(result, "next_token_ids", None)
    return None if token_ids is None else ([req.rid for req in batch.reqs], token_ids.tolist())
