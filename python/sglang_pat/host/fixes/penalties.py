"""Penalties that survive a switch: counted from the tokens generated so far, applied in one order everywhere.

Without this the ranks of a group may differ, and a request that SGLang has retracted is penalized as if it had
generated nothing.

Upstream: ``docs/upstream/penalties.md``
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_pat.host import adapter, kv
from sglang_pat.switch.transfer import upload

_StockPenalties = penaltylib.BatchedPenalizerOrchestrator


class OrderedPenalties(_StockPenalties):
    """SGLang's penalties in the order of their names: additive ones first, the repetition penalty last.

    SGLang passes a set of classes, whose order differs from process to process, and adding does not
    commute with multiplying.  This is the order of its own overlapped path.

    With overlap scheduling the last token is still on the device when the next step is launched, and SGLang counts
    the one before it, the prompt's last one to begin with.  It takes whichever token it knows of; after a step that it
    waited for (a prefill came in between, a switch) that is the last one, which the next step then counts again.
    Here it is always the same token.
    """

    def __init__(self, vocab_size: int, batch: ScheduleBatch, penalizers: set[type]) -> None:
        ordered = sorted(penalizers, key=lambda kind: kind.__name__)
        super().__init__(vocab_size, batch, [adapter.sampling.AT_ONCE.get(kind, kind) for kind in ordered])

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        batch = self.batch
        if batch.enable_overlap:
            output_ids = upload([_count_delayed_tokens(req) for req in batch.reqs], torch.int64, self.device)
        super().cumulate_output_tokens(output_ids)


def _count_delayed_tokens(req: Req) -> int:
    """The token of ``req`` that is counted when its next decode step is launched, with overlap scheduling."""
    step = kv.count_kv(req) - len(req.origin_input_ids)
    return req.output_ids[step - 1] if step else req.origin_input_ids[-1]


def list_counted_tokens(req: Req, overlap: bool, decode: bool) -> Sequence[int]:
    """The tokens that SGLang has counted for ``req`` when it is about to make a step.

    Args:
        decode: whether it is a decode step, which counts one more token when it is launched.
    """
    tokens = req.origin_input_ids[-1:] + req.output_ids if overlap else req.output_ids
    return tokens[: len(req.output_ids) - decode]


def make_sampling_info(batch: ScheduleBatch, decode: bool) -> SamplingBatchInfo:
    """Sampling state of ``batch`` whose penalties remember the tokens generated so far.

    SGLang counts output tokens step by step, so a batch built from running requests would start
    at zero (its own retraction has this gap too).  ``decode``: the batch is about to decode.
    """
    info = adapter.sampling.make_sampling_info(batch)
    if info.penalizer_orchestrator.is_required:
        # Tokens are read where they count: min_new_tokens of one request makes this run for all.
        histories = [
            list_counted_tokens(req, batch.enable_overlap, decode) if is_penalized(req) else () for req in batch.reqs
        ]
        lengths = [max(len(req.output_ids) - decode, 0) for req in batch.reqs]
        count_histories(info.penalizer_orchestrator, histories, lengths)
    return info


def is_penalized(req: Req) -> bool:
    """Whether the tokens of ``req`` change how its next one is sampled."""
    params = req.sampling_params
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)


def count_histories(
    penalties: penaltylib.BatchedPenalizerOrchestrator, histories: Sequence[Sequence[int]], lengths: Sequence[int]
) -> None:
    """Count all generated tokens at once.

    The state is, bit for bit, that of SGLang's ``cumulate_output_tokens`` called for one token after the other.

    Args:
        histories: token ids of each request; none of one that is not penalized.
        lengths: number of tokens of each request.
    """
    tokens = np.concatenate([np.asarray(history, dtype=np.int64) for history in histories])
    counts = [len(history) for history in histories]
    row = upload(np.repeat(np.arange(len(counts)), counts), torch.int64, penalties.device)
    place = row * penalties.vocab_size + upload(tokens, torch.int64, penalties.device)
    for penalizer in penalties.penalizers.values():
        if not penalizer.is_prepared():
            continue
        match penalizer:
            case penaltylib.BatchedFrequencyPenalizer():
                # Added as often as a token occurs, not multiplied: floats would differ in the last bit.
                counted = penalizer.cumulated_frequency_penalties.view(-1)
                counted.scatter_add_(0, place, penalizer.frequency_penalties.view(-1)[row])
            case penaltylib.BatchedPresencePenalizer():
                penalizer.cumulated_presence_penalties.view(-1)[place] = penalizer.presence_penalties.view(-1)[row]
            case penaltylib.BatchedRepetitionPenalizer():
                penalizer.cumulated_repetition_penalties.view(-1)[place] = penalizer.repetition_penalties.view(-1)[row]
            case penaltylib.BatchedMinNewTokensPenalizer():
                penalizer.len_output_tokens += upload(lengths, torch.int32, penalties.device).view(-1, 1)
            case _:
                raise TypeError(f"{type(penalizer).__name__}: not known here how it counts tokens")
