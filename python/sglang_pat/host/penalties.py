"""Penalties that survive a switch: counted from the tokens generated so far, applied in one order everywhere."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_HostPenalties = penaltylib.BatchedPenalizerOrchestrator


class OrderedPenalties(_HostPenalties):
    """The host's penalties in the order of their names: additive ones first, the repetition penalty last.

    The host passes a set of classes, whose order differs from process to process, and adding does not
    commute with multiplying.  This is the order of its own overlapped path.
    """

    def __init__(self, vocab_size: int, batch: ScheduleBatch, penalizers: set[type]) -> None:
        super().__init__(vocab_size, batch, sorted(penalizers, key=lambda kind: kind.__name__))


def fix_order() -> None:
    """Have the host make :class:`OrderedPenalties` in this process."""
    penaltylib.BatchedPenalizerOrchestrator = OrderedPenalties


def sampling_info_with_history(batch: ScheduleBatch, decode: bool) -> SamplingBatchInfo:
    """Sampling state of ``batch`` whose penalties remember the tokens generated so far.

    The host counts output tokens step by step, so a batch built from running requests would start
    at zero (its own retraction has this gap too).  ``decode``: the host itself will count the last
    token when it prepares the next decode step.
    """
    vocab_size = batch.model_config.vocab_size
    info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    if not info.penalizer_orchestrator.is_required:
        return info
    merged: SamplingBatchInfo | None = None
    singles = []  # keeps the batches alive that the orchestrators refer to weakly
    for req in batch.reqs:
        single = ScheduleBatch(reqs=[req], model_config=batch.model_config, device=batch.device)
        singles.append(single)
        info = SamplingBatchInfo.from_schedule_batch(single, vocab_size)
        orchestrator = info.penalizer_orchestrator
        if orchestrator.is_required:
            for token in req.output_ids[: len(req.output_ids) - decode]:
                orchestrator.cumulate_output_tokens(torch.tensor([token], device=batch.device))
        if merged is None:
            merged = info
        else:
            # The orchestrator prepares what it lacks from the requests merged so far.
            merged.merge_batch(info)
            singles[0].reqs = singles[0].reqs + [req]
    assert merged is not None
    merged.penalizer_orchestrator.batch = batch
    return merged
