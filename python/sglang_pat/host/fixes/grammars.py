"""Grammars that fail in the middle of a response abort their request; in SGLang they end the rank.

A grammar fails where a token came that it does not take (``min_new_tokens`` forbids the end, which is all that a
finished grammar allows), and where it has grown too large.

Upstream: https://github.com/sgl-project/sglang/issues/7903 (one that has grown too large),
``docs/upstream/grammars.md`` (no token is left)
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_pat.host import adapter
from sglang_pat.host.assign import Overlaid, assign
from sglang_pat.host.controls import MAX_MESSAGE


class GuardedGrammar(Overlaid):
    """A grammar in front of SGLang's mask: if it cannot say what it allows, it allows everything for this step."""

    def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
        self.note_failure(self._inner.fill_vocab_mask, vocab_mask, idx)

    def note_failure(self, call: Callable[..., Any], *args: Any) -> None:
        """Make a ``call``; if it fails, the grammar has failed."""
        try:
            call(*args)
        except Exception as error:
            self._inner.pat_failed = str(error).split("\n")[0][:MAX_MESSAGE]


def guard(info: SamplingBatchInfo) -> None:
    """Put a :class:`GuardedGrammar` before every grammar of the batch, for one step."""
    if info.grammars:
        put = adapter.sampling.guard_grammar
        assign(info, grammars=[put(grammar) if grammar else grammar for grammar in info.grammars])


def abort_failed(reqs: list[Req]) -> None:
    """Finish the requests whose grammars have failed in the step that was just run."""
    for req in reqs:
        if (error := getattr(req.grammar, "pat_failed", None)) is not None and req.to_finish is None:
            assign(req, to_finish=FINISH_ABORT(f"the grammar failed: {error}", HTTPStatus.BAD_REQUEST))


def unmask_empty_rows(logits: torch.Tensor) -> None:
    """Let rows in which a request forbids every token choose from all: SGLang's sampler dies of them.

    A grammar and ``min_new_tokens`` can do that together; the grammar then aborts the request.

    Args:
        logits: float ``[requests, vocab]``, changed in place; on CUDA nothing is waited for.
    """
    empty = ~torch.isfinite(logits.amax(dim=-1, keepdim=True))
    if logits.is_cuda or empty.any():
        logits.masked_fill_(empty, 0.0)


class MendedModelRunner(ModelRunner):
    """SGLang's ``ModelRunner``, whose requests cannot end it by what they forbid."""

    def _preprocess_logits(
        self, logits_output: LogitsProcessorOutput, sampling_info: SamplingBatchInfo, **observer: Any
    ) -> Any:
        guard(sampling_info)
        state = super()._preprocess_logits(logits_output, sampling_info, **observer)
        orchestrator = sampling_info.penalizer_orchestrator  # None with overlap scheduling, which has sums of them
        penalized = sampling_info.acc_additive_penalties is not None or (orchestrator and orchestrator.is_required)
        if sampling_info.grammars or sampling_info.logit_bias is not None or penalized:
            unmask_empty_rows(logits_output.next_token_logits)
        return state
