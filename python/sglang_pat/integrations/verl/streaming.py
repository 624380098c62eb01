"""verl's trainer that trains on groups while the others are still generated (RollPacker, section 4.4):
``trainer.v1.trainer_mode=sglang_pat_stream``.

A step starts a batch of prompts, when all before it were trained on.  As soon as groups are complete, with their
rewards, their gradients are added up; what is complete by then is the next chunk.  When the batch is there, the sum is
divided once, the weights are updated once, and go to all engines.  So the weights of the step generated all of its
tokens, and the update is that of the whole batch.

It is verl's ``separate_async`` without its prefetched prompts and with one update a step, of which another worker adds
gradients up (:mod:`sglang_pat.integrations.verl.gradient_sums`).  Where engine and trainer have the same GPUs it is
``colocate_async`` (:mod:`sglang_pat.integrations.verl.lending`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import _accumulate_eviction_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils import tensordict_utils
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from sglang_pat.integrations.verl import missing_rewards, options, stream_options
from sglang_pat.integrations.verl.fields import STEPS, expand_runs, was_stopped
from sglang_pat.integrations.verl.gradient_sums import SummingWorker
from sglang_pat.integrations.verl.tail_batching import (
    POLL_SECONDS,
    ChunkedTailBatchingBuffer,
    NoResponseError,
    make_no_response_error,
)
from sglang_pat.integrations.verl.trainers import PREFIX, AdaptiveSeparateAsync, AdaptiveTrainer
from sglang_pat.messages import EndRound
from sglang_pat.policies.course import look_ahead
from sglang_pat.policies.lending import Move, Training, decide_by_room, make_load
from sglang_pat.policies.lengths import LengthHistory

logger = logging.getLogger(__name__)

MODE = f"{PREFIX}stream"
WHERE = f"trainer.v1.trainer_mode={MODE}"
CHUNK = 0.2
"""Of the groups that are left, so many make a chunk at least."""
SWITCHED_AT = "training/stream/switched_at"
"""Metric: the share of the groups that was complete when GPUs left the round."""


def check(config: DictConfig, mode: str) -> None:
    """Refuse what would not be the update of the whole batch, or cannot be at all.

    Args:
        config: of the job.
        mode: ``trainer.v1.trainer_mode``.

    Raises:
        ValueError: one line, in the words of verl's configuration.
    """
    where = f"trainer.v1.trainer_mode={mode}"
    rollout, sampler = config.actor_rollout_ref.rollout, config.trainer.v1.sampler
    if rollout.name != options.NAME:
        raise ValueError(
            f"actor_rollout_ref.rollout.name is {rollout.name}, must be {options.NAME} with {where}: it says of each "
            "token which weights generated it"
        )
    if (custom := sampler.get("custom_sampler") or {}).get("path"):
        raise ValueError(
            f"trainer.v1.sampler.custom_sampler.path is {custom['path']!r}, must be left out with {where}: each "
            "complete group is trained on"
        )
    stream_options.check(config, where)


def set_mode(config: DictConfig, mode: str) -> DictConfig:
    """A copy for verl's trainer of this mode, with what streaming is: a batch, its update, the next batch.  verl's
    defaults are others."""
    config = deepcopy(config)
    with open_dict(config.trainer.v1):
        config.trainer.v1.trainer_mode = f"{PREFIX}{mode}"
        config.trainer.v1[mode].parameter_sync_step, config.trainer.v1[mode].num_warmup_batches = 1, 0
        config.trainer.v1.sampler.max_off_policy_threshold = None
    return config


class Stream(AdaptiveTrainer):
    """Each step: :meth:`step`.  What :data:`MODE` and the mode of lent ranks have in common."""

    _has_rounds = _announces_steps = _has_chunks = True
    _buffer_class = ChunkedTailBatchingBuffer
    _worker_class: type[SummingWorker] = SummingWorker

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.replay_buffer.poll_interval = POLL_SECONDS
        self._history = LengthHistory()
        self._left = 0
        """Groups that the batch has beside those that were trained on and those of the chunk that is being trained."""
        self._lacked_at = 0.0
        """When groups of the batch were last seen to be under way, by the performance counter."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping.keys() & {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef}:
            self.role_worker_mapping[role] = ray.remote(self._worker_class)

    def on_sample_begin(self) -> None:
        """Nothing: what verl does here is about a whole batch."""

    def on_sample_end(self) -> None:
        """The same."""

    def on_step_end(self) -> None:
        self._announce_round(EndRound())
        super().on_step_end()

    def _stop_all(self) -> None:
        ray.get([handle.stop_requests.remote() for handle in self._list_engines()])

    def _look_for_groups(self, metrics: dict[str, Any]) -> set[str]:
        """Those that are complete now and were not trained on; waits for none.  ``metrics`` get verl's figures of those
        that were replaced."""
        there, found = self.replay_buffer.wait_for_sampleable(self.global_steps, "train", 0)
        _accumulate_eviction_metrics(metrics, found, 0)
        return there

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """One update of the weights, of a batch that is trained in chunks of complete groups."""
        found = MetricsAggregator()
        found.aggregation_rules["sum"].append(missing_rewards.METRIC)
        found.add_step_metrics(self.prepare_step())
        self.actor_rollout_wg.begin_step()
        batch = wanted = self.config.data.train_batch_size
        chunks, hidden, exposed = list[KVBatchMeta](), 0.0, 0.0
        while wanted:
            of_chunk: dict[str, Any] = {}
            with marked_timer("gen", timing_raw, color="red"):
                groups, evicted = self._wait_for_groups(wanted)
            found.add_step_metrics(evicted)
            wanted = self._left = wanted - groups
            began = self._lacked_at = time.perf_counter()
            try:
                chunk = self._step_once(of_chunk, timing_raw, groups)
            except NoResponseError:  # the batch lacks these groups
                continue
            ended = time.perf_counter()
            if wanted > self.replay_buffer.get_sampleable_count(self.global_steps, "train"):
                self._lacked_at = ended
            hidden += self._lacked_at - began
            exposed += ended - self._lacked_at
            chunks.append(chunk)
            for tag in chunk.tags:
                if not tag.get("is_padding"):
                    length = tag["response_len"]
                    self._history.observe(length, 0, length < self.config.actor_rollout_ref.rollout.response_length)
            found.aggregation_rules["sum"] += [name for name in of_chunk if name.startswith("rollout/tokens/")]
            found.add_step_metrics(of_chunk, sample_count=len(chunk))
        if not chunks:
            raise make_no_response_error(batch)
        missing_rewards.check_some_left(chunks)
        if isinstance(self.replay_buffer, ChunkedTailBatchingBuffer):
            with marked_timer("gen", timing_raw, color="red"):
                found.add_step_metrics(self.replay_buffer.end_step(self.global_steps))
        with marked_timer("update_actor", timing_raw, color="red"):
            update = self._finish_update(sum(map(_count_sequences, chunks)))
        metrics.update(found.get_aggregated_metrics() | update)
        about = {"chunks": len(chunks), "hidden_seconds": hidden, "exposed_seconds": exposed}
        metrics.update({f"training/stream/{name}": value for name, value in about.items()})
        return KVBatchMeta(
            partition_id="train", keys=[key for chunk in chunks for key in chunk.keys],
            tags=[tag for chunk in chunks for tag in chunk.tags],
        )  # fmt: skip

    def _wait_for_groups(self, wanted: int) -> tuple[int, dict[str, Any]]:
        """Until a chunk is complete; its groups, at most as many as are ``wanted``, and verl's figures of those that
        were replaced meanwhile."""
        there, found = self.replay_buffer.wait_for_sampleable(self.global_steps, "train", count_least(wanted))
        return min(len(there), wanted), found

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **named: Any) -> KVBatchMeta:
        check_samples(batch, self.global_steps - 1)
        return super()._balance_batch(batch, metrics, **named)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """verl's own is a whole batch."""
        return dp_size

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Only to compare them with the engine's: else they are those of the pass that computes gradients."""
        if not self.config.actor_rollout_ref.rollout.calculate_log_probs:
            return batch
        return super()._compute_old_log_prob(self._fit_passes(batch), metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_ref_log_prob(self._fit_passes(batch), metrics)

    def _fit_passes(self, batch: KVBatchMeta) -> KVBatchMeta:
        """verl's passes without gradients want whole micro-batches; what is set here lasts for one of them."""
        passes = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.ref
        if sizes := [size for one in passes if (size := one.log_prob_micro_batch_size_per_gpu) is not None]:
            batch.extra_info["micro_batch_size_per_gpu"] = math.gcd(len(batch) // self._count_trainer_ranks(), *sizes)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The gradients of a chunk."""
        self._add_gradients(batch, metrics)
        return batch

    def _add_gradients(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> set[str]:
        """Those of a balanced batch; returns what was not trained on, since the ranks were interrupted."""
        shares = self._divide(batch)
        futures = self.actor_rollout_wg.add_gradients(shares)
        while len(ray.wait(futures, num_returns=len(futures), timeout=POLL_SECONDS)[0]) < len(futures):
            self._look_while_training(metrics)
        given = {key for share in shares if share for key in share.keys}
        added = zip(shares, ray.get(futures), strict=True)
        return given - {share.keys[row] for share, sums in added if share for row in sums.rows}

    def _look_while_training(self, metrics: dict[str, Any]) -> set[str]:
        """Useless groups are replaced, and a full batch stops what else runs; groups that are complete."""
        there = self._look_for_groups(metrics)
        if len(there) < self._left:
            self._lacked_at = time.perf_counter()
        return there

    def _is_generated(self) -> bool:
        """Whether it is known that no engine has anything of the step any more; rewards may still come."""
        return isinstance(self.replay_buffer, ChunkedTailBatchingBuffer) and self.replay_buffer.is_generated

    def _divide(self, batch: KVBatchMeta) -> list[KVBatchMeta | None]:
        """A balanced batch by data-parallel ranks, without what verl has filled it up with."""
        training = self._list_training_ranks()
        size = -(-len(batch) // len(training))
        shares: list[KVBatchMeta | None] = [None] * self._count_trainer_ranks()
        for first, rank in zip(range(0, len(batch), size), training, strict=False):
            part = range(first, min(first + size, len(batch)))
            if rows := [i for i in part if not batch.tags[i].get("is_padding")]:
                shares[rank] = KVBatchMeta(
                    partition_id=batch.partition_id, keys=[batch.keys[i] for i in rows],
                    tags=[batch.tags[i] for i in rows], extra_info=dict(batch.extra_info),
                )  # fmt: skip
        return shares

    def _list_training_ranks(self) -> Sequence[int]:
        """Data-parallel ranks that the next chunk is for."""
        return range(self._count_trainer_ranks())

    def _count_trainer_ranks(self) -> int:
        """Data-parallel ones."""
        return self.actor_rollout_wg.world_size

    def _finish_update(self, sequences: int) -> dict[str, Any]:
        """Divide, clip, update; verl's metrics of an update."""
        output = self.actor_rollout_wg.finish_step(sequences)[0]
        found = rename_dict(tensordict_utils.get(output, "metrics"), "actor/")
        found["perf/mfu/actor"] = found.pop("actor/mfu")
        return reduce_metrics(found)


class _OneVersion(PPOTrainerSeparateAsync):
    """verl's trainer, which keeps no copy of the weights: they stay as they are until the step's only update."""

    _compute_old_log_prob = PPOTrainer._compute_old_log_prob


@register_trainer(MODE)
class AdaptiveStream(Stream, AdaptiveSeparateAsync, _OneVersion):
    """With ``trainer.v1.separate_async.hybrid_rollout.enable_switch`` the trainer's GPUs generate, too, until they are
    to train (:func:`sglang_pat.policies.lending.decide_by_room`).  They change sides as whole replicas, and their
    requests go on elsewhere, from their tokens.
    """

    _tail_batching_at = f"trainer.v1.{MODE}"

    def __init__(self, config: DictConfig) -> None:
        check(config, MODE)
        if not (nodes := config.actor_rollout_ref.rollout.nnodes) > 0:
            raise ValueError(
                f"actor_rollout_ref.rollout.nnodes is {nodes}, must be at least 1 with {WHERE}: engines need GPUs of "
                "their own to generate while the trainer trains"
            )
        if config.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive":
            raise ValueError(
                "actor_rollout_ref.rollout.checkpoint_engine.backend is naive, must be another one, e.g. nccl, with "
                f"{WHERE}: weights go to other GPUs"
            )
        super().__init__(set_mode(config, "separate_async"))
        self._shares_gpus = self.hybrid_rollout_config.enable_switch
        # verl's own rule when to switch is about prefetched prompts.
        self.hybrid_rollout_config = replace(self.hybrid_rollout_config, enable_switch=False)

    def on_step_begin(self) -> None:
        if not self._shares_gpus:
            super().on_step_begin()

    def on_step_end(self) -> None:
        super().on_step_end()
        if self._shares_gpus and self.global_steps < self.total_training_steps:
            with marked_timer("switch_to_rollout", self.timing_raw, color="cyan"):
                self.switch_to_rollout()

    def _wait_for_sampleable_and_switch(self) -> dict[str, Any]:
        """Until the trainer's GPUs are its own."""
        if self.current_mode != HybridEngineMode.ROLLOUT:
            return {}
        found, last = {}, time.time()
        with marked_timer("switch_wait", self.timing_raw, color="yellow"):
            batch, asked = self.config.data.train_batch_size, 0
            while (groups := len(there := self._look_for_groups(found))) < batch:
                if self._is_generated():
                    break
                if groups != asked and self._may_leave(there):
                    break
                asked = groups
                last = self.replay_buffer._wait_for_next_poll("train", last)
        with marked_timer("switch_to_trainer", self.timing_raw, color="cyan"):
            self.switch_to_trainer()
        return found | {SWITCHED_AT: min(groups / batch, 1.0)}

    def _may_leave(self, there: set[str]) -> bool:
        """Whether the trainer's GPUs may leave the round now, with these groups complete."""
        rollout, batch = self.config.actor_rollout_ref.rollout, self.config.data.train_batch_size
        staying, others = ([handle.load.remote() for handle in manager.server_handles]
                           for manager in (self.standalone_server_manager, self.llm_server_manager))  # fmt: skip
        staying, others = ray.get(staying), ray.get(others)
        running, waiting, tokens = (
            sum(getattr(report, name) for report in staying + others) for name in ("running", "waiting", "tokens")
        )
        tags = [tag for key, tag in self.replay_buffer.partitions["train"].items() if key.partition("_")[0] in there]
        prompt = sum(tag["prompt_len"] for tag in tags) // max(len(tags), 1)
        load = make_load(running, waiting, tokens, prompt, rollout.response_length)
        outlook = look_ahead(load, self._history) if len(load) else None
        training = Training(
            samples=batch * rollout.n, complete=len(there) * rollout.n, seconds_per_token=0.0,
            ready=sum(tag["prompt_len"] + tag["response_len"] for tag in tags),
        )  # fmt: skip
        room = sum(report.kv_free + report.tokens for report in staying)
        return outlook is None or decide_by_room(training, outlook, room).move is Move.LEND


def count_least(wanted: int) -> int:
    """Groups of a chunk at least, of so many that are left: each chunk costs something, and the last ones are to be
    small, because nothing hides them."""
    return max(1, int(CHUNK * wanted))


def _count_sequences(batch: KVBatchMeta) -> int:
    return sum(not tag.get("is_padding") for tag in batch.tags)


def check_samples(batch: KVBatchMeta, version: int) -> None:
    """Hold that these weights, and no others, generated each token of a batch, and that no response was cut.

    Args:
        version: verl's, the step after which they were sent.

    Raises:
        RuntimeError: it is not so; one line.
    """
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "extra_fields"]
    )
    for key, mask, fields in zip(
        batch.keys, data["response_mask"].unbind(), data.get("extra_fields").tolist(), strict=True
    ):
        if was_stopped(fields):
            raise RuntimeError(f"response {key} was stopped before its end, must be whole: a step trains on such only")
        runs = fields.get(STEPS) or ((0, None),)
        if runs[0][0] == 0 and all(found == version for _, found in runs):
            continue  # as nearly always: a step has millions of tokens
        versions = expand_runs(runs, len(mask))
        for i, (generated, found) in enumerate(zip(mask.tolist(), versions, strict=True)):
            if generated and found != version:
                raise RuntimeError(
                    f"token {i} of response {key} is of the weights of step {found}, must be of step {version}: all "
                    "that a step trains on is of its weights"
                )
