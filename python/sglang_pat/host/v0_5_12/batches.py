"""SGLang's ``ScheduleBatch``, which has the tokens to decode after in ``output_ids``."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_pat.host.assign import assign


def set_places(batch: ScheduleBatch, places: torch.Tensor, numbers: list[int]) -> None:
    """Set the line that each request has in the table of running requests, ``[requests]``, on the device and here."""
    assign(batch, req_pool_indices=places)


def set_last_tokens(scheduler: Any, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
    """Set the token that each request decodes after, int64 ``[requests]``."""
    assign(batch, output_ids=tokens)


def count_attended(batch: ScheduleBatch) -> int:
    """Number of tokens that a decode step of ``batch`` attends to."""
    return int(batch.seq_lens_sum or 0)


def add_attended(batch: ScheduleBatch, tokens: int) -> None:
    """Note that a decode step of ``batch`` attends to so many ``tokens`` more."""
    assign(batch, seq_lens_sum=batch.seq_lens_sum + tokens)


def compute_whole(req: Req) -> None:
    """Have the whole prompt of ``req`` computed, in one piece."""
    assign(req, fill_ids=req.origin_input_ids)
    req.set_extend_input_len(len(req.fill_ids))


def forward(scheduler: Any, batch: ScheduleBatch) -> torch.Tensor:
    """Run one step and return the logits of the next token, ``[requests, vocabulary]``."""
    runner = scheduler.tp_worker.model_runner
    output = runner.forward(ForwardBatch.init_new(batch.get_model_worker_batch(), runner))
    return output.logits_output.next_token_logits
