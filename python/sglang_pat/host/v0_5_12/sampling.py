"""Sampling state of a batch: in one copy to the device, where SGLang makes one for each request; and grammars.

SGLang's llguidance keeps one mask, and fills it row by row.

Upstream: https://github.com/sgl-project/sglang/issues/31378 (``min_new_tokens`` and the ends of the generation config),
``docs/upstream/ends_of_generation_config.md`` and ``docs/upstream/penalties.md``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.host.assign import assign
from sglang_pat.host.fixes.grammars import GuardedGrammar
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
    biases = [one.logit_bias for one in params]
    try:
        for entry in params:
            assign(entry, logit_bias=None)
        info = SamplingBatchInfo.from_schedule_batch(batch, vocab)
    finally:
        for entry, bias in zip(params, biases, strict=True):
            assign(entry, logit_bias=bias)
    if any(bias is not None for bias in biases):
        assign(info, logit_bias=_make_logit_bias(biases, vocab, batch.device))
    return info


def _make_logit_bias(biases: Sequence[Mapping[str, float] | None], vocab: int, device: str) -> torch.Tensor:
    """Make SGLang's tensor of the requests' ``logit_bias``, float32 ``[requests, vocab]``."""
    rows = [{int(token): value for token, value in (bias or {}).items()} for bias in biases]
    place = [row * vocab + token for row, bias in enumerate(rows) for token in bias]
    values = list(chain.from_iterable(bias.values() for bias in rows))
    tensor = torch.zeros((len(rows), vocab), dtype=torch.float32, device=device)
    tensor.view(-1)[upload(place, torch.int64, device)] = upload(values, torch.float32, device)
    return tensor


# -- grammars ----------------------------------------------------------------------------------------------------------


def get_ebnf_kind(params: SamplingParams) -> str:
    """Kind of a grammar in EBNF, as SGLang's cache has it."""
    return "ebnf"


def guard_grammar(grammar: Any) -> GuardedGrammar:
    """A guard in front of ``grammar``, for one step."""
    return GuardedGrammar(grammar)


def forget_masks(reqs: list[Req]) -> None:
    """Have the grammars of ``reqs`` make their vocabulary masks anew in the next step (docs/upstream/grammars.md).

    SGLang's llguidance backend (our choice on a CPU) keeps one mask from step to step and fills the
    rows of constrained requests only: once rows move up, a free request would inherit another's mask.
    """
    for req in reqs:
        grammar = getattr(req.grammar, "grammar", req.grammar)  # what a reasoning wrapper holds
        if getattr(grammar, "bitmask", None) is not None:
            assign(grammar, bitmask=None)
