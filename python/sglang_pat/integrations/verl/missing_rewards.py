"""A sample whose reward is missing, as the function failed, is no sample of verl's batch, in any trainer mode.

It leaves the batch before anything is computed of it.  verl fills the batch up with rows of which no token counts, as
for a response whose generation failed.  So the advantages of its group, the loss, its divisor by tokens, the entropy
and the KL have nothing of it.  verl's filter of useless groups (``algorithm.filter_groups``) sees the rewards that were
given; a group that has too few of them is replaced, as one whose generation failed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from sglang_pat.integrations.verl.fields import MISSING
from sglang_pat.rollout.missing import choose_rewarded

METRIC = "reward/failed_masked"
"""Metric: the number of samples of a step that were left out."""
Reasons = tuple[set[str], set[str], set[str], Counter[float]]
"""verl's reasons to evict groups: uids of stale, equal and failed ones, and how often each equal reward is there."""


def find_missing(keys: Sequence[str], partition: str) -> set[str]:
    """Keys of the responses, of these, whose reward is missing."""
    if not keys:
        return set()
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=["extra_fields"])
    return {key for key, fields in zip(keys, data.get("extra_fields").tolist(), strict=True) if fields.get(MISSING)}


def choose_keys(keys: Iterable[str], missing: set[str]) -> set[str]:
    """Keys of the responses that are trained on; ``uid_session_index``, and all of a session have one reward."""
    groups: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in keys:
        uid, session, _ = key.rsplit("_", 2)
        groups[uid][session].append(key)
    kept: set[str] = set()
    for sessions in groups.values():
        rows = list(sessions.values())
        if missing.isdisjoint(key for row in rows for key in row):
            chosen = range(len(rows))
        else:
            chosen = choose_rewarded([missing.isdisjoint(row) for row in rows])
        kept.update(key for index in chosen for key in rows[index])
    return kept


def leave_out(batch: KVBatchMeta, metrics: dict[str, Any], filler: int) -> KVBatchMeta:
    """The batch without samples whose reward is missing; one row of which no token counts, if there is no other.

    Args:
        metrics: where :data:`METRIC` is set.
        filler: token of such a row.
    """
    kept = choose_keys(batch.keys, find_missing(batch.keys, batch.partition_id))
    metrics[METRIC] = len(batch) - len(kept)
    if len(kept) == len(batch):
        return batch
    left_out = [key for key in batch.keys if key not in kept]
    if not kept:
        batch = upsample_batch_to_divisible_size(batch, len(batch) + 1, filler)
        kept = set(batch.keys) - set(left_out)
    tq.kv_clear(keys=left_out, partition_id=batch.partition_id)
    return batch.select_keys([key for key in batch.keys if key in kept])


def check_some_left(batches: Iterable[KVBatchMeta]) -> None:
    """Raise unless a whole update has something to train on.

    Raises:
        RuntimeError: it has nothing; one line.
    """
    if all(tag.get("is_padding") for batch in batches for tag in batch.tags):
        raise RuntimeError(
            "no response of this step has a reward to train on: the reward function has failed for all of them; the "
            "log of each reward worker says how, at its first failure"
        )


def judge_given(buffer: ReplayBuffer) -> None:
    """Have a buffer's filter see only rewards that were given."""
    find_reasons = buffer._terminal_eviction_reasons

    def find_reasons_of_given(global_steps: int, partition_id: str) -> Reasons:
        if partition_id == "val" or buffer.filter_groups_metric is None:
            return find_reasons(global_steps, partition_id)
        judged, all_of_them = buffer._dapo_classification_cache[partition_id], buffer.partitions[partition_id]
        new = buffer.finished_keys[partition_id] - judged.keys()
        keys = [key for key in all_of_them if key.partition("_")[0] in new]
        missing = find_missing(keys, partition_id)
        if missing:
            rewarded = {key.partition("_")[0] for key in choose_keys(keys, missing)}
            without = {key.partition("_")[0] for key in missing} - rewarded
            judged.update(dict.fromkeys(without, math.nan))  # verl asks for no reward of these
            buffer.partitions[partition_id] = {key: tag for key, tag in all_of_them.items() if key not in missing}
        try:
            stale, equal, failed, counts = find_reasons(global_steps, partition_id)
        finally:
            buffer.partitions[partition_id] = all_of_them
        without = {uid for uid in equal if math.isnan(judged[uid])}
        counts = Counter({reward: groups for reward, groups in counts.items() if not math.isnan(reward)})
        return stale, equal - without, failed | without, counts

    buffer._terminal_eviction_reasons = find_reasons_of_given
