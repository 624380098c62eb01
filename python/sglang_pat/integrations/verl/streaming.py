"""verl's trainer that trains on groups while the others are still generated (RollPacker, section 4.4):
``trainer.v1.trainer_mode=sglang_pat_stream``.

The weights of a step generate all of its tokens, and its update is that of the whole batch (``docs/streaming.md``).

:class:`StreamStep` is such a step, from top to bottom.  :class:`StreamTrainer` is a trainer whose ``step`` it is; its
worker adds gradients up (:mod:`~sglang_pat.integrations.verl.gradient_sums`).  :class:`AdaptiveStream` is the one of
verl's ``separate_async``.  Where engine and trainer have the same GPUs it is ``colocate_async``
(:mod:`~sglang_pat.integrations.verl.stream_lent`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import _accumulate_eviction_metrics
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.utils import tensordict_utils
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from sglang_pat.integrations.verl import missing_rewards, options, rewards
from sglang_pat.integrations.verl.fields import STEPS, expand_runs, was_stopped
from sglang_pat.integrations.verl.fleet import ask_each, check_some_live
from sglang_pat.integrations.verl.gradient_sums import SummingWorker
from sglang_pat.integrations.verl.tail_batching import ChunkedTailBatchingBuffer, NoResponseError
from sglang_pat.integrations.verl.trainers import AdaptiveTrainer, StepMetrics, report_degrees
from sglang_pat.messages import EndRound
from sglang_pat.policies.course import look_ahead
from sglang_pat.policies.lending import Move, Training, decide_by_room, make_load
from sglang_pat.policies.lengths import LengthHistory

MODE = f"{options.PREFIX}stream"
CHUNK = 0.2
"""Least share of a chunk in the groups that are left."""
LEFT_AT = "training/stream/switched_at"
"""Metric: the share of the groups that was complete when GPUs left the round."""


class Gpus:
    """Rule of who has the trainer's GPUs.

    Attributes:
        ranks: data-parallel ranks of the trainer that can train now; none, while all of them generate.
        train_alone: some ranks may train while others generate, so there are none of verl's passes over all ranks.
        left_at: share of the groups that was complete when GPUs left the round; None: none generate.
    """

    ranks: Sequence[int] = ()
    train_alone = False
    left_at: float | None = None

    def begin_step(self) -> None:
        """Called before the step's prompts are started."""

    def follow(self, step: StreamStep, groups: set[str], is_training: bool) -> None:
        """Called after a look at the round: who has the GPUs may change, but for ranks that are training.

        Args:
            groups: uids of groups that are complete and were not taken for a chunk.
        """

    def begin_chunk(self) -> None:
        """Called before ranks begin to compute gradients."""

    def note_chunk(self, chunk: KVBatchMeta, seconds: float, ranks: Sequence[int]) -> None:
        """Called after a chunk, which began on these ranks."""


class StreamStep:
    """One step of a trainer that streams: its prompts, its chunks, its one update.

    :meth:`run` is the step.  :meth:`look` is the one place where its round is watched, both while the trainer waits for
    groups and while ranks compute gradients.

    Args:
        trainer: trainer whose step it is; what is called of it is verl's.
        gpus: rule of who has its GPUs.

    Attributes:
        left: number of groups that the batch has beside those that were taken for chunks.
    """

    def __init__(self, trainer: AdaptiveTrainer, gpus: Gpus) -> None:
        self.trainer, self.gpus, self.buffer = trainer, gpus, trainer.replay_buffer
        self.batch = self.left = trainer.config.data.train_batch_size
        self._evicted: dict[str, Any] = {}
        """verl's figures of the groups that were replaced."""
        self._lacked_at = 0.0
        """Time when groups of the batch were last seen to be under way, by the performance counter."""
        gpus.begin_step()

    def run(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Run the step, as verl's ``PPOTrainer.step``: one update of the weights, by chunks of complete groups."""
        trainer, chunks, hidden, exposed = self.trainer, list[KVBatchMeta](), 0.0, 0.0
        aggregator = StepMetrics()
        aggregator.add_step_metrics(trainer.prepare_step())
        trainer.actor_rollout_wg.begin_step()
        while self.left:
            with marked_timer("gen", timing_raw, color="red"):
                groups = self.wait_for_groups()
            self.left -= groups
            chunk_metrics, ranks = dict[str, Any](), self.gpus.ranks
            began = self._lacked_at = time.perf_counter()
            try:
                chunk = self.train_chunk(groups, chunk_metrics, timing_raw)
            except NoResponseError:  # the batch lacks these groups
                continue
            ended = time.perf_counter()
            if self.left > self.buffer.get_sampleable_count(trainer.global_steps, "train"):
                self._lacked_at = ended
            hidden += self._lacked_at - began
            exposed += ended - self._lacked_at
            chunks.append(chunk)
            self.gpus.note_chunk(chunk, ended - began, ranks)
            aggregator.add_step_metrics(chunk_metrics, sample_count=len(chunk))
        if not chunks:
            raise NoResponseError(self.batch)
        missing_rewards.check_some_left(chunks)
        if isinstance(self.buffer, ChunkedTailBatchingBuffer):
            with marked_timer("gen", timing_raw, color="red"):
                aggregator.add_step_metrics(self.buffer.end_step(trainer.global_steps))
        aggregator.add_step_metrics(self._evicted)
        with marked_timer("update_actor", timing_raw, color="red"):
            samples = sum(len(list_samples(chunk)) for chunk in chunks)
            output = trainer.actor_rollout_wg.finish_step(samples)[0]  # divide, clip, update
        update = rename_dict(tensordict_utils.get(output, "metrics"), "actor/")
        update["perf/mfu/actor"] = update.pop("actor/mfu")
        metrics.update(aggregator.get_aggregated_metrics() | reduce_metrics(update))
        stream = {"chunks": len(chunks), "hidden_seconds": hidden, "exposed_seconds": exposed}
        metrics.update({f"training/stream/{name}": value for name, value in stream.items()})
        if self.gpus.left_at is not None:
            metrics[LEFT_AT] = self.gpus.left_at
        return KVBatchMeta(
            partition_id="train", keys=[key for chunk in chunks for key in chunk.keys],
            tags=[tag for chunk in chunks for tag in chunk.tags],
        )  # fmt: skip

    # -- the round ---------------------------------------------------------------------------------------

    def wait_for_groups(self) -> int:
        """Wait until a chunk is complete and there are ranks to train it; returns the number of its groups."""
        return min(self.follow_round(count_least(self.left)), self.left)

    def follow_round(self, least: int = 0) -> int:
        """Wait until ``least`` groups are complete and there are ranks that can train; returns how many are."""
        last = time.time()
        while (groups := len(self.look())) < least or not self.gpus.ranks:
            last = self.buffer._wait_for_next_poll("train", last)
        return groups

    def look(self, is_training: bool = False) -> set[str]:
        """Look at the round once: useless groups are replaced, a full batch stops the rest, GPUs change hands in time.

        Returns:
            uids of the groups that are complete and were not taken for a chunk.
        """
        groups, evicted = self.buffer.wait_for_sampleable(self.trainer.global_steps, "train", 0)
        _accumulate_eviction_metrics(self._evicted, evicted, 0)
        if len(groups) < self.left:
            self._lacked_at = time.perf_counter()
        self.gpus.follow(self, groups, is_training)
        return groups

    def count_complete(self, groups: set[str]) -> int:
        """Number of the batch's groups that the trainer has had, or could have: the latter are ``groups``."""
        return self.batch - self.left + len(groups)

    def list_tags(self, uids: Set[str]) -> list[dict[str, Any]]:
        """verl's tags of the samples of these groups, of those that are there."""
        tags = self.buffer.partitions["train"].items()
        return [tag for key, tag in tags if key.partition("_")[0] in uids and "response_len" in tag]

    def is_generated(self) -> bool:
        """Whether it is known that no engine has anything of the step any more; rewards may still come."""
        return isinstance(self.buffer, ChunkedTailBatchingBuffer) and self.buffer.is_generated

    # -- a chunk -----------------------------------------------------------------------------------------

    def train_chunk(self, groups: int, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Train on some groups, as verl's ``PPOTrainer._step_once``, with their gradients in place of an update."""
        trainer, config = self.trainer, self.trainer.config
        with marked_timer("gen", timing_raw, color="red"):
            batch, evicted = self.buffer.sample(
                global_steps=trainer.global_steps, partition_id="train", batch_size=groups
            )
        _accumulate_eviction_metrics(self._evicted, evicted, 0)
        batch.extra_info["temperature"] = config.actor_rollout_ref.rollout.temperature
        check_some_live(trainer.fleets)
        check_samples(batch, trainer.global_steps - 1)
        trainer.note_moves(batch)
        if rewards.is_used(config):
            batch = missing_rewards.leave_out(batch, metrics, trainer.tokenizer.eos_token_id)
        batch = PPOTrainer._balance_batch(trainer, batch, metrics)
        with marked_timer("old_log_prob", timing_raw, color="blue"):
            # Only to compare them with the engine's: else they are those of the pass that computes gradients.
            if config.actor_rollout_ref.rollout.calculate_log_probs:
                batch = PPOTrainer._compute_old_log_prob(trainer, self._fit_passes(batch), metrics)
                batch = report_degrees(config, batch, metrics)
        if trainer.use_reference_policy:
            with marked_timer("ref", timing_raw, color="olive"):
                if not self.gpus.train_alone:  # else it is a part of the pass that computes gradients
                    batch = trainer._compute_ref_log_prob(self._fit_passes(batch), metrics)
        with marked_timer("adv", timing_raw, color="brown"):
            batch = trainer._compute_advantage(batch, metrics)
        with marked_timer("update_actor", timing_raw, color="red"):
            self.add_gradients(batch)
        return batch

    def _fit_passes(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Set a size of micro-batches that divides a rank's part, as verl's passes without gradients want it; it lasts
        for one pass."""
        passes = self.trainer.config.actor_rollout_ref.rollout, self.trainer.config.actor_rollout_ref.ref
        if sizes := [size for one in passes if (size := one.log_prob_micro_batch_size_per_gpu) is not None]:
            world_size = self.trainer.actor_rollout_wg.world_size
            batch.extra_info["micro_batch_size_per_gpu"] = math.gcd(len(batch) // world_size, *sizes)
        return batch

    def add_gradients(self, batch: KVBatchMeta) -> None:
        """Add up the gradients of a balanced batch.  Ranks that can train then do what interrupted ones have left."""
        rest = batch
        while keys := self.try_gradients(rest):
            self.follow_round()
            rest = _deal(rest, keys, len(self.gpus.ranks))

    def try_gradients(self, batch: KVBatchMeta) -> set[str]:
        """Add up the gradients of a balanced batch; returns the keys of samples that interrupted ranks have left."""
        shares = self.divide(batch)
        self.gpus.begin_chunk()
        futures = self.trainer.actor_rollout_wg.add_gradients(shares)
        while len(done := self._wait_for_ranks(futures)) < len(futures):
            ray.get(done)  # raises what a rank has failed of: the others of its replica wait for it
            self.look(is_training=True)
        keys = {key for share in shares if share for key in share.keys}
        added = zip(shares, ray.get(futures), strict=True)
        return keys - {share.keys[row] for share, sums in added if share for row in sums.rows}

    def _wait_for_ranks(self, futures: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
        """Wait until all ranks are done, or for a moment; returns those that are."""
        return ray.wait(list(futures), num_returns=len(futures), timeout=self.buffer.poll_interval)[0]

    def divide(self, batch: KVBatchMeta) -> list[KVBatchMeta | None]:
        """Shares of a balanced batch, by data-parallel rank, without what verl has filled it up with."""
        size = -(-len(batch) // len(self.gpus.ranks))
        shares: list[KVBatchMeta | None] = [None] * self.trainer.actor_rollout_wg.world_size
        for first, rank in zip(range(0, len(batch), size), self.gpus.ranks, strict=False):
            part = slice(first, first + size)
            tags = zip(batch.keys[part], batch.tags[part], strict=True)
            if keys := [key for key, tag in tags if not tag.get("is_padding")]:
                shares[rank] = batch.select_keys(keys)
        return shares


class TrainerGpus(Gpus):
    """GPUs that are the trainer's.  While verl's replicas on them generate, they are handed over to the trainer as soon
    as :func:`~sglang_pat.policies.lending.decide_by_room` says so."""

    def __init__(self, trainer: AdaptiveStream) -> None:
        self._trainer = trainer
        self._lengths = LengthHistory()
        self._asked_at = 0  # groups were complete at the last question

    def begin_step(self) -> None:
        generate = self._trainer.current_mode == HybridEngineMode.ROLLOUT
        self.ranks = () if generate else range(self._trainer.actor_rollout_wg.world_size)
        self.left_at, self._asked_at = None, 0

    def follow(self, step: StreamStep, groups: set[str], is_training: bool) -> None:
        if self.ranks:
            return
        complete = step.count_complete(groups)
        over = complete >= step.batch or step.is_generated()
        if over or (complete != self._asked_at and self._may_leave(step, groups)):
            self.ranks = range(self._trainer.actor_rollout_wg.world_size)
            self.left_at = min(complete / step.batch, 1.0)
        self._asked_at = complete

    def note_chunk(self, chunk: KVBatchMeta, seconds: float, ranks: Sequence[int]) -> None:
        limit = self._trainer.config.actor_rollout_ref.rollout.response_length
        for tag in list_samples(chunk):
            self._lengths.observe(tag["response_len"], 0, tag["response_len"] < limit)

    def _may_leave(self, step: StreamStep, groups: set[str]) -> bool:
        """Whether the GPUs may leave the round now, with these groups complete."""
        trainer, tags = self._trainer, step.list_tags(groups)
        rollout = trainer.config.actor_rollout_ref.rollout
        staying, leaving = (
            [report for report in ask_each(manager.server_handles, "load") if report is not None]
            for manager in (trainer.standalone_server_manager, trainer.llm_server_manager)
        )
        running, waiting, tokens = (
            sum(getattr(report, name) for report in staying + leaving) for name in ("running", "waiting", "tokens")
        )
        prompt = sum(tag["prompt_len"] for tag in tags) // max(len(tags), 1)
        load = make_load(running, waiting, tokens, prompt, rollout.response_length)
        outlook = look_ahead(load, self._lengths) if len(load) else None
        training = Training(
            samples=step.batch * rollout.n, complete=len(groups) * rollout.n, ready=sum_tokens(tags),
            seconds_per_token=0.0,
        )  # fmt: skip
        room = sum(report.kv_free + report.tokens for report in staying)
        return outlook is None or decide_by_room(training, outlook, room).move is Move.LEND


class StreamTrainer(AdaptiveTrainer):
    """A trainer whose steps are streamed.

    Attributes:
        gpus_class: rule of who has its GPUs.
    """

    streams = True
    step_class, worker_class = StreamStep, SummingWorker
    gpus_class: Callable[[Any], Gpus]

    def __init__(self, config: DictConfig) -> None:
        options.check_stream(config, str(self.name), self.mode, self.lends_ranks)
        super().__init__(config)
        self.gpus = self.gpus_class(self)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        self.stream = self.step_class(self, self.gpus)
        batch = self.stream.run(metrics, timing_raw)
        self.engines.announce(EndRound())
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """The number of ranks, of which a chunk is a multiple; verl's own is a whole batch."""
        return dp_size


@register_trainer(MODE)
class AdaptiveStream(StreamTrainer, PPOTrainerSeparateAsync):
    """verl's ``separate_async``, which streams.

    With ``trainer.v1.separate_async.hybrid_rollout.enable_switch`` the trainer's GPUs generate, too, until they are to
    train.  They are handed over as whole replicas, and their requests go on elsewhere, from their tokens.
    """

    mode, name, gpus_class = "separate_async", MODE, TrainerGpus

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self._hands_over = self.hybrid_rollout_config.enable_switch
        # verl's own rule when to hand replicas over is about prefetched prompts.
        self.hybrid_rollout_config = replace(self.hybrid_rollout_config, enable_switch=False)

    def on_step_begin(self) -> None:
        if not self._hands_over:
            super().on_step_begin()

    def _wait_for_sampleable_and_switch(self) -> dict[str, Any]:
        """verl's hook, when the prompts are started: wait until replicas are handed over to the trainer, and do it."""
        if not self.gpus.ranks:
            with marked_timer("switch_wait", self.timing_raw, color="yellow"):
                self.stream.follow_round()
            with marked_timer("switch_to_trainer", self.timing_raw, color="cyan"):
                self.switch_to_trainer()
        return {}

    def on_step_end(self) -> None:
        super().on_step_end()
        if self._hands_over and self.global_steps < self.total_training_steps:
            with marked_timer("switch_to_rollout", self.timing_raw, color="cyan"):
                self.switch_to_rollout()


def count_least(left: int) -> int:
    """Least number of a chunk's groups, of those that are left: each chunk costs something, and the last ones are to be
    small, because nothing hides them."""
    return max(1, int(CHUNK * left))


def list_samples(batch: KVBatchMeta) -> list[dict[str, Any]]:
    """verl's tags of a batch's samples, without what it is filled up with."""
    return [tag for tag in batch.tags if not tag.get("is_padding")]


def sum_tokens(tags: Iterable[Mapping[str, Any]]) -> int:
    """Number of tokens of prompts and responses, by verl's tags."""
    return sum(tag["prompt_len"] + tag["response_len"] for tag in tags)


def _deal(batch: KVBatchMeta, keys: set[str], ranks: int) -> KVBatchMeta:
    """Some samples of a batch, in an order in which equal parts are for ranks with about the same work."""
    lengths = {key: tag["seq_len"] for key, tag in zip(batch.keys, batch.tags, strict=True) if key in keys}
    longest = sorted(lengths, key=lengths.__getitem__, reverse=True)
    return batch.select_keys([key for rank in range(ranks) for key in longest[rank::ranks]])


def check_samples(batch: KVBatchMeta, version: int) -> None:
    """Raise unless these weights, and no others, generated each token of a batch, and that no response was cut.

    Args:
        version: verl's version of the weights, the step after which they were sent.

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
        if runs[0][0] == 0 and all(generated == version for _, generated in runs):
            continue  # as nearly always: a step has millions of tokens
        versions = expand_runs(runs, len(mask))
        for i, (counts, generated) in enumerate(zip(mask.tolist(), versions, strict=True)):
            if counts and generated != version:
                raise RuntimeError(
                    f"token {i} of response {key} is of the weights of step {generated}, must be of step {version}: "
                    "all that a step trains on is of its weights"
                )
