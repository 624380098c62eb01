"""Penalties that survive a switch: counted from the tokens generated so far, applied in one order everywhere."""

from __future__ import annotations

import numpy as np
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
    info = SamplingBatchInfo.from_schedule_batch(batch, batch.model_config.vocab_size)
    if info.penalizer_orchestrator.is_required:
        remember(info.penalizer_orchestrator, [req.output_ids[: len(req.output_ids) - decode] for req in batch.reqs])
    return info


def remember(penalties: penaltylib.BatchedPenalizerOrchestrator, histories: list[list[int]]) -> None:
    """Count all tokens of ``histories`` (``[requests]`` lists of token ids) at once.

    The state is, bit for bit, that of the host's ``cumulate_output_tokens`` called for one token after the other.
    """
    lengths = [len(history) for history in histories]
    tokens = np.concatenate([np.asarray(history, dtype=np.int64) for history in histories])
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(penalties.device)
    place = row * penalties.vocab_size + torch.from_numpy(tokens).to(penalties.device)
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
                penalizer.len_output_tokens += torch.tensor(lengths, dtype=torch.int32).to(penalties.device).view(-1, 1)
            case _:
                raise TypeError(f"{type(penalizer).__name__}: not known here how it counts tokens")
