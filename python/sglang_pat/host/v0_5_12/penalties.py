"""Sampling state of a batch in one copy to the device; SGLang makes one for each request.

Upstream: https://github.com/sgl-project/sglang/issues/31378 (``min_new_tokens`` and the ends of the generation config),
``docs/upstream/ends_of_generation_config.md`` and ``docs/upstream/penalties.md``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_pat.host.assign import assign
from sglang_pat.switch.transfer import upload


class BatchedMinNewTokensAtOnce(penaltylib.BatchedMinNewTokensPenalizer):
    """SGLang's penalizer, which makes a tensor on the device for each request; here all come in one copy."""

    def _prepare(self) -> None:
        reqs, device, vocab = self.orchestrator.reqs(), self.orchestrator.device, self.orchestrator.vocab_size
        place = []
        for row, req in enumerate(reqs):
            ends = {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
            ends |= req.sampling_params.stop_token_ids or set()
            ends |= req.eos_token_ids or set()  # those of the generation config, which SGLang forgets
            place += [row * vocab + token for token in ends if 0 <= token < vocab]
        self.min_new_tokens = upload([r.sampling_params.min_new_tokens for r in reqs], torch.int32, device).view(-1, 1)
        self.stop_token_penalties = torch.zeros((len(reqs), vocab), dtype=torch.float32, device=device)
        self.stop_token_penalties.view(-1)[upload(place, torch.int64, device)] = float("-inf")
        self.len_output_tokens = torch.zeros((len(reqs), 1), dtype=torch.int32, device=device)


AT_ONCE = {penaltylib.BatchedMinNewTokensPenalizer: BatchedMinNewTokensAtOnce}
"""SGLang's penalizers, and those in their place."""


def make_sampling_info(batch: ScheduleBatch) -> SamplingBatchInfo:
    """SGLang's sampling state of ``batch``; it would write each entry of a ``logit_bias`` by itself."""
    vocab, params = batch.model_config.vocab_size, [req.sampling_params for req in batch.reqs]
    biases = [given.logit_bias for given in params]
    try:
        for given in params:
            assign(given, logit_bias=None)
        info = SamplingBatchInfo.from_schedule_batch(batch, vocab)
    finally:
        for given, bias in zip(params, biases, strict=True):
            assign(given, logit_bias=bias)
    if any(bias is not None for bias in biases):
        assign(info, logit_bias=_make_logit_bias(biases, vocab, batch.device))
    return info


def _make_logit_bias(biases: Sequence[Mapping[str, float] | None], vocab: int, device: str) -> torch.Tensor:
    """Make SGLang's tensor of the requests' ``logit_bias``, float32 ``[requests, vocab]``."""
    rows = [{int(token): value for token, value in (bias or {}).items()} for bias in biases]
    place = [row * vocab + token for row, bias in enumerate(rows) for token in bias]
    values = list(chain.from_iterable(bias.values() for bias in rows))
    found = torch.zeros((len(rows), vocab), dtype=torch.float32, device=device)
    found.view(-1)[upload(place, torch.int64, device)] = upload(values, torch.float32, device)
    return found
