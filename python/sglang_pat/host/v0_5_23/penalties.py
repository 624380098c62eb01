"""Sampling state of a batch: SGLang copies it to the device at once, with all ends of a response."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

AT_ONCE: dict[type, type] = {}
"""SGLang's penalizers, and those in their place: ``BatchedMinNewTokensPenalizer`` makes one copy by itself."""


def make_sampling_info(batch: ScheduleBatch) -> SamplingBatchInfo:
    """SGLang's sampling state of ``batch``."""
    return SamplingBatchInfo.from_schedule_batch(batch, batch.model_config.vocab_size)
