"""SGLang's ``ScheduleBatch``, whose tokens to decode after are in the scheduler's ``FutureMap``, by line."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_pat.host.assign import assign


def set_places(batch: ScheduleBatch, places: torch.Tensor, numbers: list[int]) -> None:
    """Set the line that each request has in the table of running requests, ``[requests]``, on the device and here."""
    assign(batch, req_pool_indices=places, req_pool_indices_cpu=torch.tensor(numbers, dtype=torch.int64))


def set_last_tokens(scheduler: Any, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
    """Set the token that each request decodes after, int64 ``[requests]``."""
    assign(batch, input_ids=None)
    scheduler.future_map.output_tokens_buf[batch.req_pool_indices] = tokens


def count_attended(batch: ScheduleBatch) -> int:
    """Number of tokens that a decode step of ``batch`` attends to; SGLang sums lengths up in the step only."""
    return 0 if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum())


def add_attended(batch: ScheduleBatch, tokens: int) -> None:
    """Note that a decode step of ``batch`` attends to more ``tokens``: SGLang sums lengths up in the step."""
    assign(batch, seq_lens_sum=None)


def compute_whole(req: Req) -> None:
    """Have the whole prompt of ``req`` computed, in one piece."""
    req.refresh_fill_ids()
    assign(req, prefix_len=0, extend_end=len(req.origin_input_ids))


def forward(scheduler: Any, batch: ScheduleBatch) -> torch.Tensor:
    """Run one step and return the logits of the next token, ``[requests, vocabulary]``."""
    runner = scheduler.tp_worker.model_runner
    resolve_forward_inputs(batch, scheduler.future_map)
    output = runner.forward(ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False))
    assign(batch, input_ids=None)
    return output.logits_output.next_token_logits
