"""verl's trainers, with what this engine adds to them: ``trainer.v1.trainer_mode=sglang_pat_sync`` and the like.

Registered where verl looks them up; without the setting verl's own run, and generate with this engine all the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from msgspec.structs import replace
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.actor import ActorHandle
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient

from sglang_pat import figures
from sglang_pat.integrations.verl import options, rewards
from sglang_pat.integrations.verl.client import AdaptiveAsyncClient, AdaptiveClient
from sglang_pat.integrations.verl.fields import DEGREES, expand_runs
from sglang_pat.integrations.verl.reward_ledger import TrainerLedger
from sglang_pat.integrations.verl.tail_batching import TailBatchingBuffer, check_beside, read_rules
from sglang_pat.messages import BeginRound, EndRound

logger = logging.getLogger(__name__)

PREFIX = "sglang_pat_"
NO_TAIL_BATCHING = (
    "verl's own loop carries unfinished responses over there; tail batching is an option of "
    f"{PREFIX}sync, {PREFIX}stream and {PREFIX}stream_lent"
)
WAITING_FILE = "tail_batching.pt"
"""In a checkpoint's folder."""
LIMITS_FILE = "reward_limits.json"
"""In the same."""


def _check_config_before_start(make: Callable[..., None]) -> Callable[..., None]:
    """A constructor of verl's, before which the job's configuration is checked: no model has been loaded yet."""

    @functools.wraps(make)
    def checked(self: PPOTrainer, config: DictConfig) -> None:
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        if options.is_adaptive(rollout, helper=False):
            options.check(rollout, rollout.n_gpus_per_node, config.actor_rollout_ref.model)
        rewards.check(config)
        make(self, config)

    return checked


def _check_data_after(load: Callable[[PPOTrainer], None]) -> Callable[[PPOTrainer], None]:
    """verl's loading of the data, after which it is known what rewards will need; still before any model."""

    @functools.wraps(load)
    def loaded(self: PPOTrainer) -> None:
        load(self)
        found: set[str] = set()
        for data in (self.train_dataset, self.val_dataset):
            rows = getattr(data, "dataframe", None)  # a user's own dataset may have none
            if rows is not None and "data_source" in getattr(rows, "column_names", ()):
                found.update(rows.unique("data_source"))
        rewards.check_sandbox(self.config, found)

    return loaded


for _trainer in (PPOTrainer, PPOTrainerSeparateAsync):  # the second looks at its own options first
    _trainer.__init__ = _check_config_before_start(_trainer.__init__)
PPOTrainer._init_dataloader = _check_data_after(PPOTrainer._init_dataloader)


class AdaptiveTrainer(PPOTrainer):
    """Says how far trainer and engine disagree about a token, by the TP degree that generated it, and how the engines
    spent the step."""

    _figures: list[figures.Figures]
    """Of each engine, until the last step."""
    _has_rounds = False
    """Also of engines that have GPUs of their own: what runs there is one step's."""
    _ledger: TrainerLedger | None = None
    """Of rewards with limits."""
    _ends: TrainerLedger | None = None
    """Of responses that have ended, with tail batching; the same one, if there are rewards with limits."""
    _tail_batching_at: str | None = None
    """Where the options of tail batching are; None: this mode has none."""
    _buffer_class: type[TailBatchingBuffer] = TailBatchingBuffer
    _announces_steps = False
    """The prompts of a step are announced to the engines."""

    def __init__(self, config: DictConfig) -> None:
        config = deepcopy(config)
        mode, own = config.trainer.v1.trainer_mode, self._tail_batching_at
        for name in config.trainer.v1:
            if name.startswith(PREFIX) and f"trainer.v1.{name}" != own and (given := config.trainer.v1.get(name)):
                why = f"those of this mode are in {own}" if own else NO_TAIL_BATCHING
                raise ValueError(f"trainer.v1.{name} has no option {min(given)!r}, must be left out: {why}")
        with open_dict(config.trainer.v1):
            # verl asks for this name in several places.
            config.trainer.v1.trainer_mode = mode.removeprefix(PREFIX)
        super().__init__(config)

    def _setup(self) -> None:
        if rewards.is_used(self.config):
            self._ledger = TrainerLedger(rewards.read_limit_rules(self.config))
        if isinstance(self.replay_buffer, TailBatchingBuffer):
            self._ends = self._ledger or TrainerLedger(rewards.read_limit_rules(self.config))
        super()._setup()
        self._figures = self._ask_totals()

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self._announce_round(BeginRound(kind="validation"))

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self._announce_round(EndRound())
        if self._ledger:
            self._ledger.take_metrics()  # no step's

    def _announce_round(self, message: BeginRound | EndRound) -> None:
        """Tell the engines, before the requests that it is about."""
        handles = self._list_engines()
        if isinstance(message, BeginRound) and len(handles) > 1:  # nobody knows how many requests each will get
            message = replace(message, requests=None, prompts=None)
        ray.get([handle.announce_round.remote(message, self._has_rounds) for handle in handles])

    def _consume_sync_metrics(self) -> dict:
        """verl's, of the step that has just ended, and ours."""
        before, self._figures = self._figures, self._ask_totals()
        steps = [now.subtract(then) for now, then in zip(self._figures, before, strict=True)]
        found = super()._consume_sync_metrics() | (figures.compute_metrics(steps) if steps else {})
        return found | (self._ledger.take_metrics() if self._ledger else {})

    # -- prompts of a step -------------------------------------------------------------------------------

    def _build_replay_buffer(self) -> ReplayBuffer:
        """verl's, or that of tail batching."""
        if (where := self._tail_batching_at) is None:
            return super()._build_replay_buffer()
        rollout, sampler = self.config.actor_rollout_ref.rollout, self.config.trainer.v1.sampler
        groups = self.config.algorithm.get("filter_groups") or {}
        refills = bool(sampler.get("sync_refill_failed_groups"))
        rules = read_rules(
            OmegaConf.select(self.config, where) or {}, where, self.config.data.train_batch_size, rollout.n,
            filter_groups=refills or bool(groups.get("enable")),
        )  # fmt: skip
        if rules is None:
            return super()._build_replay_buffer()
        check_beside(self.config, self.trainer_mode, where, rules)
        metric = self._resolve_filter_groups_metric()
        most_batches = max(groups.get("max_num_gen_batches", 0), 0) if metric else 0
        if most_batches:  # of which verl has just said that it is ignored
            logger.warning("algorithm.filter_groups.max_num_gen_batches=%s holds with tail batching", most_batches)
        return self._buffer_class(
            rules, rollout.response_length, self._submit_rows, self._stop_all, self._announce_round, most_batches,
            # With a filter a step goes on until verl has the rewards.
            take_ends=dict if rules.filter_groups else self._take_ends, drop=self._drop_prompts,
            trainer_mode=self.trainer_mode, trainer_config=self.config.trainer.v1.get(self.trainer_mode, {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy, sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate, filter_groups_metric=metric, sync_refill_failed_groups=refills,
            gen_batch_size=1,
        )  # fmt: skip

    def _submit_rows(self, rows: list[TensorDict]) -> None:
        batch = tensordict_utils.concat_tensordict(rows)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        self._submit_batch_to_rollout(batch)

    def _stop_all(self) -> None:
        """All that the engines generate."""
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.resume_generation_replicas()

    def _take_ends(self) -> Mapping[str, Mapping[int, int]]:
        assert self._ends is not None, "a step comes after the setup"
        return self._ends.take_ends(self.global_steps)

    def _drop_prompts(self, uids: set[str]) -> None:
        assert self._ends is not None, "a step comes after the setup"
        self._ends.drop(self.global_steps, uids)

    def _add_batch_to_generate(self) -> None:
        if isinstance(self.replay_buffer, TailBatchingBuffer):
            return self.replay_buffer.begin(self.global_steps, self._fetch_one_gen_batch)
        if self._announces_steps:
            self._announce_round(self._describe_step())
        super()._add_batch_to_generate()

    def _describe_step(self) -> BeginRound:
        """Without tail batching."""
        rollout, buffer = self.config.actor_rollout_ref.rollout, self.replay_buffer
        is_verls = type(buffer) in (ReplayBuffer, ReplayBufferAsync)
        if not is_verls or buffer.filter_groups_metric or buffer.sync_refill_failed_groups:
            return BeginRound(max_new_tokens=rollout.response_length)  # more may come
        prompts = self.config.data.train_batch_size
        return BeginRound.of_size(prompts, rollout.n, max_new_tokens=rollout.response_length)

    # -- checkpoints -------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """verl's, with what was learnt for rewards, and the prompts that wait: they have left its data loader."""
        if self._ledger:
            self._ledger.save(self._make_checkpoint_folder() / LIMITS_FILE)
        if isinstance(self.replay_buffer, TailBatchingBuffer):
            torch.save(self.replay_buffer.get_state(), self._make_checkpoint_folder() / WAITING_FILE)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        if self._ledger and (path := self._find_saved(LIMITS_FILE, "time limits of rewards are learnt anew")):
            self._ledger.load(path)
        waiting = "prompts that waited at this checkpoint, if any, are left out"
        if isinstance(self.replay_buffer, TailBatchingBuffer) and (path := self._find_saved(WAITING_FILE, waiting)):
            # As verl reads its own files; this one has its rows in it, which are no tensors alone.
            self.replay_buffer.restore(torch.load(path, weights_only=False), str(path))

    def _find_saved(self, name: str, otherwise: str) -> Path | None:
        """A file of the checkpoint from which the job goes on; none: the log says what follows."""
        path = self._get_loaded_folder() / name
        if path.exists():
            return path
        logger.warning("%s is not there: %s", path, otherwise)
        return None

    def _make_checkpoint_folder(self) -> Path:
        """Of this step.  For files that are written first: verl ends with the note that a checkpoint is complete."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _get_loaded_folder(self) -> Path:
        """Of the checkpoint from which the job goes on."""
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            return Path(trainer.resume_from_path)
        return Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _ask_totals(self) -> list[figures.Figures]:
        """Of all engines since their start."""
        return ray.get([handle.get_totals.remote() for handle in self._list_engines()])

    def _list_engines(self) -> list[ActorHandle]:
        """Their actors; none, if they are verl's own."""
        rollout = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout)
        if not options.is_adaptive(rollout, False):
            return []
        managers = (self.llm_server_manager, getattr(self, "standalone_server_manager", None))
        return [handle for manager in managers if manager for handle in manager.server_handles]

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        found = super()._compute_old_log_prob(batch, metrics)
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            fields = ["old_log_probs", "rollout_log_probs", "response_mask", "extra_fields"]
            data = tq.kv_batch_get(keys=found.keys, partition_id=found.partition_id, select_fields=fields)
            correction = self.config.algorithm.get("rollout_correction") or {}
            # In bypass mode verl takes the engine's log-probs for the trainer's: a difference of 0 would say nothing.
            metrics.update(_make_degree_metrics(data, differences=not correction.get("bypass_mode")))
        return found


def _make_degree_metrics(data: Any, differences: bool = True) -> dict[str, float]:
    """``rollout/tokens/tp2`` and so on, of all generated tokens; with ``differences`` also
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
    found: dict[str, float] = {}
    for tp in sorted(parts):
        values = torch.cat(parts[tp])
        if differences:
            found[f"training/rollout_probs_diff_max/tp{tp}"] = values.max().item()
            found[f"training/rollout_probs_diff_mean/tp{tp}"] = values.mean().item()
        found[f"rollout/tokens/tp{tp}"] = len(values)
    return found


@register_trainer(f"{PREFIX}sync")
class AdaptiveSync(AdaptiveTrainer, PPOTrainerSync):
    """Also with tail batching: ``+trainer.v1.sglang_pat_sync.tail_batching=strict`` or ``reorder``."""

    _tail_batching_at = f"trainer.v1.{PREFIX}sync"
    _announces_steps = True

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=AdaptiveClient)


@register_trainer(f"{PREFIX}colocate_async")
class AdaptiveColocateAsync(AdaptiveTrainer, PPOTrainerColocateAsync):
    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=AdaptiveAsyncClient)


@register_trainer(f"{PREFIX}separate_async")
class AdaptiveSeparateAsync(AdaptiveTrainer, PPOTrainerSeparateAsync):
    def _setup(self) -> None:
        level = trainer_separate_async.logger.level
        trainer_separate_async.logger.setLevel(logging.WARNING)  # verl 0.9.1 fails at a line of INFO of its own
        super()._setup()
        trainer_separate_async.logger.setLevel(level)

    def get_llm_client(self) -> LLMServerClient:
        return self.standalone_server_manager.get_client(client_cls=AdaptiveAsyncClient)
