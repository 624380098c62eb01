"""verl's trainers, with what this engine adds to them: ``trainer.v1.trainer_mode=sglang_pat_sync`` and the like.

The trainer of a mode is verl's own and :class:`AdaptiveTrainer`, whose hooks call objects: :class:`Engines`,
:class:`~.tail_batching.TailBatchingBuffer`, :class:`~.reward_ledger.TrainerLedger`.  A hook of verl's is overridden
there or in the class of a mode, never in both.

verl's own modes run as they are, but for :class:`CheckedTrainer`, whose classes have their names in verl's registry.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from msgspec.structs import replace
from omegaconf import DictConfig
from ray.actor import ActorHandle
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from sglang_pat import figures
from sglang_pat.integrations.verl import missing_rewards, options, rewards
from sglang_pat.integrations.verl.client import AdaptiveAsyncClient, AdaptiveClient
from sglang_pat.integrations.verl.fields import DEGREES, MOVES, expand_runs
from sglang_pat.integrations.verl.fleet import Fleet, ask_each, check_some_live
from sglang_pat.integrations.verl.options import PREFIX
from sglang_pat.integrations.verl.reward_ledger import TrainerLedger
from sglang_pat.integrations.verl.tail_batching import ChunkedTailBatchingBuffer, TailBatchingBuffer
from sglang_pat.messages import BeginRound, EndRound

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Seconds between two looks at what is complete; verl's two seconds are the length of a small step."""
WAITING_FILE = "tail_batching.pt"
"""The file of a checkpoint with the prompts that wait: they have left verl's data loader."""
LIMITS_FILE = "reward_limits.json"
"""The file of a checkpoint with what was learnt of rewards' time limits."""


FLEETS = {
    "checkpoint_manager": "llm_server_manager", "standalone_checkpoint_manager": "standalone_server_manager"
}  # fmt: skip
"""verl's managers of replicas and of their servers, by their names in its trainers."""
TOKENS = "rollout/tokens/"
"""Beginning of the metrics with the tokens of a TP degree."""


class StepMetrics(MetricsAggregator):
    """Metrics of a step in several parts, of which our counts are added up: verl's own has their mean."""

    def _get_aggregation_type(self, metric_name: str) -> str:
        is_count = metric_name == missing_rewards.METRIC or metric_name.startswith(TOKENS)
        return "sum" if is_count else super()._get_aggregation_type(metric_name)


trainer_base.MetricsAggregator = StepMetrics  # which verl's step makes


class CheckedTrainer(PPOTrainer):
    """verl's trainer, which refuses a wrong setting of ours before any model is loaded, trains on no sample whose
    reward is missing, and goes on when an engine dies.

    Attributes:
        mode: verl's own name of the trainer mode.
        fleets: the engines, by verl's manager of their weights.
        lends_ranks: whether a trainer may have ranks of the engines while these generate.
    """

    mode: str
    lends_ranks = False
    fleets: Sequence[Fleet] = ()
    _moves: Sequence[Sequence[int]] = ()
    """Moves of the step's responses, see :data:`~.fields.MOVES`."""

    def __init__(self, config: DictConfig) -> None:
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        self.is_adaptive = options.is_adaptive(rollout, helper=False)
        if self.is_adaptive:
            options.check(rollout, rollout.n_gpus_per_node, config.actor_rollout_ref.model)
        rewards.check(config)
        super().__init__(config)

    def _init_dataloader(self) -> None:
        """Load the data, which says what rewards will need.  No model is there yet."""
        super()._init_dataloader()
        sources: set[str] = set()
        for data in (self.train_dataset, self.val_dataset):
            rows = getattr(data, "dataframe", None)  # a user's own dataset may have none
            if rows is not None and "data_source" in getattr(rows, "column_names", ()):
                sources.update(rows.unique("data_source"))
        rewards.check_sandbox(self.config, sources)

    def _setup(self) -> None:
        if rewards.is_used(self.config):
            missing_rewards.judge_given(self.replay_buffer)
        super()._setup()
        balancer = self._get_requested_servers().global_load_balancer
        for manager, servers in FLEETS.items() if self.is_adaptive else ():
            if hasattr(self, manager):
                own_gpus = manager != "checkpoint_manager"
                fleet = Fleet(getattr(self, manager), getattr(self, servers), balancer, own_gpus)
                setattr(self, manager, fleet)
                self.fleets = [*self.fleets, fleet]
        self._wait_only_for_living(self.replay_buffer)

    def _wait_only_for_living(self, buffer: ReplayBuffer) -> None:
        """Have whoever waits for responses see to the engines that generate them.

        Dead ones are started anew meanwhile.  If none is left, the wait ends: verl would fail prompt after prompt.
        """
        wait = buffer._wait_for_next_poll

        def wait_for_living(*args: Any) -> float:
            generates = getattr(self, "current_mode", HybridEngineMode.ROLLOUT) == HybridEngineMode.ROLLOUT
            generating = [fleet for fleet in self.fleets if fleet.own_gpus or generates]
            check_some_live(generating)
            for fleet in () if self.lends_ranks else generating:
                fleet.start_dead()
            return wait(*args)

        buffer._wait_for_next_poll = wait_for_living

    def get_llm_client(self) -> LLMServerClient:
        if not self.is_adaptive:
            return super().get_llm_client()
        if self.mode == "sync":
            return self._get_requested_servers().get_client(client_cls=AdaptiveClient)
        # Where engines may sleep in a round, requests wait for those while none is awake.
        return self._get_requested_servers().get_client(client_cls=AdaptiveAsyncClient, only_hybrid=self.lends_ranks)

    def _get_requested_servers(self) -> LLMServerManager:
        """verl's manager whose balancer all requests go through: the trainer's own replicas join and leave it."""
        return getattr(self, "standalone_server_manager", self.llm_server_manager)

    def _consume_sync_metrics(self) -> dict[str, Any]:
        """Metrics of the step that has just ended, verl's and ours."""
        metrics = super()._consume_sync_metrics()
        for fleet in self.fleets:
            for name, value in fleet.take_metrics().items():
                metrics[name] = metrics.get(name, 0.0) + value
        moves, self._moves = self._moves, []
        if self.fleets:
            metrics["rollout/moved_requests"] = float(len(moves))
            metrics["rollout/tokens_of_dead_engines"] = float(sum(at[-1] for at in moves))
        return metrics

    def note_moves(self, batch: KVBatchMeta) -> None:
        """Note which responses of a part of the step's batch had engines that died; without what it is filled up
        with."""
        if self.fleets:
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
            moves = [fields[MOVES] for fields in data.get("extra_fields").tolist() if MOVES in fields]
            self._moves = [*self._moves, *moves]

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], **named: Any) -> KVBatchMeta:
        """Balance what verl's step has sampled, without samples whose reward is missing."""
        check_some_live(self.fleets)
        self.note_moves(batch)
        if rewards.is_used(self.config):
            batch = missing_rewards.leave_out(batch, metrics, self.tokenizer.eos_token_id)
            missing_rewards.check_some_left([batch])
        return super()._balance_batch(batch, metrics, **named)


for _mode in ("sync", "colocate_async", "separate_async"):
    _verls = TRAINER_REGISTRY[_mode]
    TRAINER_REGISTRY[_mode] = type(f"Checked{_verls.__name__}", (CheckedTrainer, _verls), {"mode": _mode})


class Engines:
    """The engines, as a trainer tells and asks them."""

    def __init__(self, trainer: AdaptiveTrainer) -> None:
        self._trainer = trainer
        self._totals: dict[ActorHandle, figures.Figures] | None = None
        """Figures of what each engine had done when it was last asked; None: none was."""

    def list_actors(self) -> list[ActorHandle]:
        """The engines' Ray actors, in their order, those of dead ones among them; none, if the engines are verl's
        own."""
        trainer = self._trainer
        if not trainer.is_adaptive:
            return []
        managers = (trainer.llm_server_manager, getattr(trainer, "standalone_server_manager", None))
        return [actor for manager in managers if manager for actor in manager.server_handles]

    def announce(self, message: BeginRound | EndRound) -> None:
        """Tell the engines of a round, before the requests that it is about."""
        actors = self.list_actors()
        if isinstance(message, BeginRound) and len(actors) > 1:  # nobody knows how many requests each will get
            message = replace(message, requests=None, prompts=None)
        # Where a step is streamed engines with GPUs of their own have rounds, too: what runs there is one step's.
        ask_each(actors, "announce_round", message, self._trainer.streams)

    def stop_requests(self) -> None:
        """End all that runs, and all that comes before the next round."""
        ask_each(self.list_actors(), "stop_requests")

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what the engines did since the last call; none at the first one."""
        actors = self.list_actors()
        totals = zip(actors, ask_each(actors, "get_totals"), strict=True)
        before, self._totals = self._totals, {actor: now for actor, now in totals if now is not None}
        if before is None or not self._totals:
            return {}
        nothing = figures.Figures()  # what a new engine had done
        return figures.compute_metrics(
            [now.subtract(before.get(actor, nothing)) for actor, now in self._totals.items()]
        )


class AdaptiveTrainer(CheckedTrainer):
    """verl's trainer, which says how far trainer and engine disagree about a token, by the TP degree that generated it,
    and how the engines spent the step.

    Attributes:
        name: name of the mode in ``trainer.v1``, where its options are; None: it has none, and its steps do not begin
            with their prompts.
        streams: whether a step is trained in chunks, as its groups are complete.
        worker_class: class of the trainer's ranks; None: verl's.
        tail_batching: buffer of the job's tail batching; None: it has none.
        ledger: ledger of rewards with limits; None: the job has none.
    """

    name: str | None = None
    streams = False
    worker_class: type[ActorRolloutRefWorker] | None = None
    tail_batching: TailBatchingBuffer | None = None
    ledger: TrainerLedger | None = None

    def __init__(self, config: DictConfig) -> None:
        self.engines = Engines(self)
        super().__init__(options.set_verls_mode(config, self.mode, self.name, self.streams))

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping.keys() & {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef}:
            if self.worker_class:
                self.role_worker_mapping[role] = ray.remote(self.worker_class)

    def _setup(self) -> None:
        rules = rewards.read_limit_rules(self.config)
        if rewards.is_used(self.config):
            self.ledger = TrainerLedger(rules)
        if self.tail_batching:
            self.tail_batching.ledger = self.ledger or TrainerLedger(rules)
        level = trainer_separate_async.logger.level
        trainer_separate_async.logger.setLevel(logging.WARNING)  # verl 0.9.1 fails at a line of INFO of its own
        super()._setup()
        trainer_separate_async.logger.setLevel(level)
        self.engines.take_metrics()

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self.engines.announce(BeginRound(kind="validation"))

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self.engines.announce(EndRound())
        if self.name:  # else prompts of the step go on meanwhile
            self.engines.take_metrics()  # no step's
        if self.ledger:
            self.ledger.take_metrics()

    def _consume_sync_metrics(self) -> dict[str, Any]:
        """Metrics of the step that has just ended, verl's and ours."""
        ours = self.engines.take_metrics() | (self.ledger.take_metrics() if self.ledger else {})
        return super()._consume_sync_metrics() | ours

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return report_degrees(self.config, super()._compute_old_log_prob(batch, metrics), metrics)

    def _build_replay_buffer(self) -> ReplayBuffer:
        """Build verl's buffer, or that of tail batching."""
        where = f"trainer.v1.{self.name}"
        if self.name and (rules := options.read_tail_batching(self.config, where, self.trainer_mode)):
            kind = ChunkedTailBatchingBuffer if self.streams else TailBatchingBuffer
            self.tail_batching = kind.of_trainer(self, rules)
        buffer = self.tail_batching or super()._build_replay_buffer()
        if self.tail_batching or self.streams:
            buffer.poll_interval = POLL_SECONDS
        return buffer

    def _add_batch_to_generate(self) -> None:
        if self.tail_batching:
            return self.tail_batching.begin(self.global_steps)
        if self.name:
            self.engines.announce(self._describe_step())
        super()._add_batch_to_generate()

    def _describe_step(self) -> BeginRound:
        """The message that begins a step without tail batching."""
        rollout, buffer = self.config.actor_rollout_ref.rollout, self.replay_buffer
        is_verls = type(buffer) in (ReplayBuffer, ReplayBufferAsync)
        limit, prompts = rollout.response_length, self.config.data.train_batch_size
        if not is_verls or buffer.filter_groups_metric or buffer.sync_refill_failed_groups:
            return BeginRound(max_new_tokens=limit)  # more may come
        return BeginRound.of_size(prompts, rollout.n, max_new_tokens=limit)

    def _save_checkpoint(self) -> None:
        """Write our files, then verl's: verl ends with the note that a checkpoint is complete."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        if self.ledger:
            self.ledger.save(folder / LIMITS_FILE)
        if self.tail_batching:
            torch.save(self.tail_batching.get_state(), folder / WAITING_FILE)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        if self.ledger and (path := self._find_saved(LIMITS_FILE, "time limits of rewards are learnt anew")):
            self.ledger.load(path)
        waiting = "prompts that waited at this checkpoint, if any, are left out"
        if self.tail_batching and (path := self._find_saved(WAITING_FILE, waiting)):
            # As verl reads its own files; this one has its rows in it, which are no tensors alone.
            self.tail_batching.restore(torch.load(path, weights_only=False), str(path))

    def _find_saved(self, name: str, otherwise: str) -> Path | None:
        """A file of the checkpoint from which the job goes on; where there is none, the log has ``otherwise``."""
        trainer = self.config.trainer
        resumed = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        path = Path(resumed or f"{trainer.default_local_dir}/global_step_{self.global_steps}") / name
        if path.exists():
            return path
        logger.warning("%s is not there: %s", path, otherwise)
        return None


def report_degrees(config: DictConfig, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
    """Add a batch's figures by degree to ``metrics``, if the engine's log-probs are there; returns the batch.  Its old
    log-probs are computed."""
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        fields = ["old_log_probs", "rollout_log_probs", "response_mask", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        correction = config.algorithm.get("rollout_correction") or {}
        # In bypass mode verl takes the engine's log-probs for the trainer's: a difference of 0 would say nothing.
        metrics.update(_make_degree_metrics(data, differences=not correction.get("bypass_mode")))
    return batch


def _make_degree_metrics(data: Any, differences: bool = True) -> dict[str, float]:
    """Metrics ``rollout/tokens/tp2`` and so on, of all generated tokens; with ``differences`` also
    ``training/rollout_probs_diff_max/tp2``."""
    parts: dict[int, list[torch.Tensor]] = {}
    columns = (data[name].unbind() for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    for ours, theirs, mask, fields in zip(*columns, data.get("extra_fields").tolist(), strict=True):
        if not fields.get(DEGREES):
            continue
        degrees = torch.tensor([tp or 0 for tp in expand_runs(fields[DEGREES], len(mask))]) * mask.bool()
        difference = (ours.exp() - theirs.exp()).abs()
        for tp in degrees[degrees > 0].unique().tolist():
            parts.setdefault(tp, []).append(difference[degrees == tp])
    metrics: dict[str, float] = {}
    for tp in sorted(parts):
        values = torch.cat(parts[tp])
        if differences:
            metrics[f"training/rollout_probs_diff_max/tp{tp}"] = values.max().item()
            metrics[f"training/rollout_probs_diff_mean/tp{tp}"] = values.mean().item()
        metrics[f"{TOKENS}tp{tp}"] = len(values)
    return metrics


@register_trainer(f"{PREFIX}sync")
class AdaptiveSync(AdaptiveTrainer, PPOTrainerSync):
    """verl's ``sync``, also with tail batching: ``+trainer.v1.sglang_pat_sync.tail_batching=strict`` or ``reorder``."""

    mode, name = "sync", f"{PREFIX}sync"


@register_trainer(f"{PREFIX}colocate_async")
class AdaptiveColocateAsync(AdaptiveTrainer, PPOTrainerColocateAsync):
    mode = "colocate_async"


@register_trainer(f"{PREFIX}separate_async")
class AdaptiveSeparateAsync(AdaptiveTrainer, PPOTrainerSeparateAsync):
    mode = "separate_async"
