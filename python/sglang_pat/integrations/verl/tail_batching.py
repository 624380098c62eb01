"""Tail batching under verl (RollPacker, section 3.1): prompts that would hold up a step wait for a step of their own.

A step starts more prompts than it trains on, takes those whose responses are all there first, and stops the rest.  They
start anew in a later step: every response that is trained on was generated whole by the weights of its step, as without
tail batching.  Which prompts run in which step is the decision of :class:`~sglang_pat.rollout.admitter.Admitter`,
which also bounds how often a prompt can be passed over.

A trainer that streams gets the groups of a step as they are taken (:class:`ChunkedTailBatchingBuffer`).

verl's loop sets three limits:

- A prompt is started and stopped with all its responses: verl's agent loops run them together.
- Only everything can be stopped, not one prompt.  A redraw that is not needed any more runs on until the step's batch
  is complete.
- A response is started from its prompt: one that was stopped cannot go on (mode ``partial``).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Self

from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, _accumulate_eviction_metrics
from verl.utils import tensordict_utils

from sglang_pat.integrations.verl.reward_ledger import TrainerLedger
from sglang_pat.messages import BeginRound
from sglang_pat.rollout import records
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.rounds import make_announcement
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import LONG

logger = logging.getLogger(__name__)


class TailBatchingBuffer(ReplayBuffer):
    """verl's replay buffer, which waits for the prompts that the admitter takes.

    verl's own filter says which groups are of use (``filter_groups_metric``, ``sync_refill_failed_groups``).  Their
    rewards are there when all their responses are: verl's workers write a response with its reward.

    Args:
        trainer: the :class:`~.trainers.AdaptiveTrainer` whose buffer it is.
        rules: rules of the admitter.
        limit: most tokens of a response.
        most_batches: most batches of groups to judge in a step (verl's ``max_num_gen_batches``); 0: any number.
        named: arguments of verl's buffer.

    Attributes:
        ledger: ledger that says which responses have ended; it is there from the trainer's setup on.
        summary: the last round's.
    """

    ledger: TrainerLedger

    def __init__(self, trainer: Any, rules: Rules, limit: int, most_batches: int = 0, **named: Any) -> None:
        super().__init__(**named)
        self._trainer, self._limit, self._admitter = trainer, limit, Admitter(rules)
        self._ends: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """Number of tokens of each response of this round that is known to have ended, by uid and session."""
        self._most_judged = most_batches * rules.num_prompts
        self._judged = 0
        """Number of groups of this round for which there was a verdict."""
        self._complete: dict[str, records.PromptKey] = {}
        """Groups that wait for a verdict, by uid, in the order in which they were completed."""
        self._evicted: dict[str, Any] = {}
        """verl's figures of the useless groups of this round."""
        self._rows: dict[int, TensorDict] = {}
        """Prompts that were not trained on yet, by their index."""
        self._fed = 0
        self._under_way: dict[str, dict[int, records.SampleId]] = {}
        """Responses that verl's workers have, by uid and session."""
        self._started: dict[str, float] = {}
        """Time when a prompt was started, by uid, by the machine's monotonic clock."""
        self._unsettled: set[str] = set()
        """Uids of prompts with which verl's workers are not done."""
        self._begun = self._over_at = 0.0
        """Times when the round began and was over, by the machine's monotonic clock."""
        self._uids: dict[tuple[int, int], str] = {}
        """Uids of this round, by index and number of the draw (``rollout/redraws.py``)."""
        self._taken: list[str] = []
        self._given: set[str] = set()
        """Uids of groups of this step that a trainer that streams has taken."""
        self._failed: set[str] = set()
        """Uids of groups that are taken and lack responses."""
        self._over, self._stopped = True, False
        self._rewarded_at: float | None = None
        """Time when all groups that are taken had their rewards, by the machine's monotonic clock."""
        self.summary: records.Summary | None = None

    @classmethod
    def of_trainer(cls, trainer: Any, rules: Rules) -> Self:
        """The buffer of a job."""
        config, mode, metric = trainer.config, trainer.trainer_mode, trainer._resolve_filter_groups_metric()
        groups, sampler = config.algorithm.get("filter_groups") or {}, config.trainer.v1.sampler
        most_batches = max(groups.get("max_num_gen_batches", 0), 0) if metric else 0
        if most_batches:  # of which verl has just said that it is ignored
            logger.warning("algorithm.filter_groups.max_num_gen_batches=%s holds with tail batching", most_batches)
        return cls(
            trainer, rules, config.actor_rollout_ref.rollout.response_length, most_batches,
            trainer_mode=mode, trainer_config=config.trainer.v1.get(mode, {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy, sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=trainer._add_prompts_to_generate, filter_groups_metric=metric,
            sync_refill_failed_groups=bool(sampler.get("sync_refill_failed_groups")), gen_batch_size=1,
        )  # fmt: skip

    # -- what it asks of others --------------------------------------------------------------------------

    def _fetch(self) -> TensorDict:
        """More prompts of the data."""
        return self._trainer._fetch_one_gen_batch()

    def _announce(self, message: BeginRound) -> None:
        self._trainer.engines.announce(message)

    def _submit(self, rows: list[TensorDict]) -> None:
        """Start prompts."""
        batch = tensordict_utils.concat_tensordict(rows)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", self._trainer.global_steps)
        self._trainer._submit_batch_to_rollout(batch)

    def _stop(self) -> None:
        """End all that the engines generate."""
        self._trainer.checkpoint_manager.abort_replicas()
        self._trainer.checkpoint_manager.resume_generation_replicas()

    def _take_ends(self) -> Mapping[str, Mapping[int, int]]:
        """Tokens of responses that have ended since the last call, by uid and session, before verl has their rewards;
        others have ended when verl has written them."""
        if self._admitter.rules.filter_groups:
            return {}  # a step goes on until verl has the rewards
        return self.ledger.take_ends(self._trainer.global_steps)

    def _drop(self, uids: set[str]) -> None:
        """Tell of prompts that nobody will train on."""
        self.ledger.drop(self._trainer.global_steps, uids)

    # -- a step ------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """State between two steps: what another process needs to go on, the prompts that wait among it."""
        return {**self._admitter.state_dict(), "rows": self._rows, "fed": self._fed}

    def restore(self, state: dict[str, Any], source: str) -> None:
        """Go on where :meth:`get_state` was called.

        Raises:
            ValueError: it is of another version, one line that names its ``source``.
        """
        self._admitter.load_state_dict(state, source)
        self._rows, self._fed = state["rows"], state["fed"]

    def begin(self, version: int) -> None:
        """Start a step's prompts."""
        while prompts := self._admitter.wanted:
            self._feed(prompts)
        self._taken, self._over, self._begun = [], False, time.monotonic()
        self._judged, self._evicted, self._stopped, self._rewarded_at = 0, {}, False, None
        self._failed.clear()
        self._uids.clear()
        self._given.clear()
        self._complete.clear()
        self._ends.clear()
        self._take_ends()  # from now on they are kept
        actions = self._admitter.begin(version)
        self._announce(make_announcement(self._admitter, BeginRound().name, {"max_new_tokens": self._limit}))
        self._do(actions)

    def _feed(self, prompts: int) -> list[records.Action]:
        """Feed ``prompts`` prompts or a few more, at once: each call of the admitter goes through all keys so far."""
        first = self._fed
        while self._fed < first + prompts:
            rows = self._fetch()
            for i in range(len(rows)):
                self._rows[self._fed] = rows[i : i + 1]
                self._fed += 1
        return self._admitter.feed([((0, index), None) for index in range(first, self._fed)])

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """The step's batch, once nothing of it is under way any more."""
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        metrics = self.end_step(global_steps)
        snapshot = dict(self.partitions[partition_id])
        if set(self._taken).isdisjoint(_get_uids(snapshot)):
            raise NoResponseError(len(self._taken))
        return self._materialize_batch(partition_id, self._taken, snapshot), metrics

    def end_step(self, global_steps: int) -> dict[str, Any]:
        """Wait until nothing of the step is under way, and forget what was not taken; returns the step's metrics."""
        partition_id, last = "train", time.time()
        self._look(global_steps, partition_id)
        while not self._over or self._unsettled:
            last = self._wait_for_next_poll(partition_id, last)
            self._look(global_steps, partition_id)
        ended = self.finished_keys[partition_id] | self.failure_keys[partition_id]
        self._clear_groups(partition_id, (_get_uids(self.partitions[partition_id]) | ended) - set(self._taken))
        return self._make_metrics() | self._take_evicted()

    def _look(self, global_steps: int, partition_id: str) -> None:
        """Tell the admitter what verl's workers have written since the last look, and stop the rest of a full batch."""
        self._sync_metadata_from_transfer_queue()
        ended = self.finished_keys[partition_id] | self.failure_keys[partition_id]
        for uid, tokens in self._take_ends().items():
            self._ends[uid].update(tokens)
        self._report_responses(self.partitions[partition_id], ended, self._stopped)
        self._unsettled -= ended
        if self._complete:
            self._judge_groups(global_steps, partition_id)
        taken = set(self._taken)
        self._failed |= taken & self.failure_keys[partition_id]
        if self._over:
            if self._rewarded_at is None and self._unsettled.isdisjoint(taken):
                self._rewarded_at = time.monotonic()
        elif len(taken) >= self._admitter.rules.num_prompts:
            if not self._stopped:
                self._drop(self._unsettled - taken)
            # An agent that goes on after its aborted turn is stopped again.
            self._stop()
            self._stopped = True

    def _take_evicted(self) -> dict[str, Any]:
        """verl's figures of the useless groups since the last call."""
        evicted, self._evicted = self._evicted, {}
        return evicted

    def _judge_groups(self, global_steps: int, partition_id: str) -> None:
        """Tell the admitter which complete groups are of use.

        Raises:
            RuntimeError: as many were judged as may be, and the batch is not full; one line.
        """
        _, equal, failed, _ = self._terminal_eviction_reasons(global_steps, partition_id)
        complete, self._complete = self._complete, {}
        self._judged += len(complete)
        equal, failed = equal & complete.keys(), failed & complete.keys()
        rewards = Counter(self._dapo_classification_cache[partition_id][uid] for uid in equal)
        _, _, _, metrics = self._evict_terminal_groups(global_steps, partition_id, (set(), equal, failed, rewards))
        _accumulate_eviction_metrics(self._evicted, metrics, 0)
        useless = equal | failed
        for uid in useless:
            del self._rows[complete[uid].index]
        self._do(self._admitter.record_verdicts((key, uid not in useless) for uid, key in complete.items()))
        taken, num_prompts = len(self._taken), self._admitter.rules.num_prompts
        if taken < num_prompts and 0 < self._most_judged <= self._judged:
            raise RuntimeError(
                f"step {global_steps}: of {self._judged} groups {taken} are of use, must be {num_prompts}, and "
                f"algorithm.filter_groups.max_num_gen_batches is {self._most_judged // num_prompts}: give other "
                "prompts, a larger number, or 0 for no limit"
            )

    def _report_responses(self, trajectories: Mapping[str, Mapping[str, Any]], ended: set[str], stopped: bool) -> None:
        """Tell the admitter which responses are there, in the order in which they were started.

        Args:
            trajectories: verl's tags, by key.
            ended: uids of the prompts with which verl's workers are done.
            stopped: whether all were stopped since the last look.
        """
        lengths = _collect_lengths(trajectories)
        for uid, left in list(self._under_way.items()):
            tokens = self._ends[uid] | lengths[uid]
            now = [session for session in left if uid in ended or session in tokens]
            if uid not in ended and not self._ends[uid]:
                now = now[: len(left) - 1]  # verl will still note that the prompt has ended
            for session in now:
                self._report_response_end(
                    left.pop(session), tokens.get(session, 0), time.monotonic() - self._started[uid], stopped
                )
            if not left:
                del self._under_way[uid], self._started[uid]

    def _report_response_end(self, sample: records.SampleId, tokens: int, seconds: float, stopped: bool) -> None:
        under_way = self._admitter.state.round
        assert under_way is not None, "a sample ends in its round"
        spans = [records.Span(under_way.version, tokens)]
        if stopped:
            return self._do(self._admitter.record_stopped(sample, records.Output(spans=spans)))
        reason = "length" if tokens >= self._limit else "stop"
        return self._do(
            self._admitter.record_finished(sample, records.Output(spans=spans, finish_reason=reason, seconds=seconds))
        )

    def _do(self, actions: Iterable[records.Action]) -> None:
        draws: dict[tuple[int, int], dict[int, records.SampleId]] = defaultdict(dict)
        responses, lacks = self._admitter.rules.num_responses, 0
        for action in actions:
            match action:
                case records.Launch(sample=sample):
                    draw, session = divmod(sample.number, responses)
                    draws[sample.index, draw][session] = sample
                case records.ReturnGroup(group=group):
                    del self._rows[group.index]
                    self._taken.append(self._uids[group.index, group.rejected])
                case records.Judge(group=group):
                    self._complete[self._uids[group.index, group.rejected]] = group.key
                case records.NeedPrompts(prompts=prompts):
                    lacks += prompts
                case records.RoundOver(summary=summary):
                    self._over, self._over_at = True, time.monotonic()
                    self.summary = self._admitter.record_round_time(summary, time.monotonic() - self._begun)
                case records.Abort():
                    pass  # all that are left, together: see sample
        if draws:
            self._start(draws)
        if lacks:
            self._do(self._feed(lacks))

    def _start(self, draws: Mapping[tuple[int, int], dict[int, records.SampleId]]) -> None:
        """Start each draw with all its responses; draws of one prompt are prompts of their own to verl."""
        rows = []
        for (index, draw), samples in draws.items():
            row = self._rows[index]
            if draw:
                row = row.clone(recurse=False)
                tensordict_utils.assign_non_tensor_stack(row, "uid", [str(uuid.uuid4())])
            uid = self._uids[index, draw] = row["uid"][0]
            self._under_way[uid] = samples
            self._started[uid] = time.monotonic()
            self._unsettled.add(uid)
            rows.append(row)
        self._submit(rows)

    def _make_metrics(self) -> dict[str, float]:
        summary = self.summary
        assert summary is not None and self._rewarded_at is not None, "asked after a round"
        names = "redraws", "mean_returned", "mean_undropped", "mean_undropped_error", "mean_seconds", "plain_seconds"
        metrics = {name: getattr(summary, name) for name in names} | {
            "long_round": float(summary.kind == LONG),
            "stopped_prompts": summary.deferred,
            "failed_prompts": len(self._failed),
            "waiting_prompts": len(summary.ages),
            "oldest_waiting": max(summary.ages, default=0),
            "reward_seconds": self._rewarded_at - self._over_at,
        }
        return {f"training/tail_batching/{name}": value for name, value in metrics.items()}


class ChunkedTailBatchingBuffer(TailBatchingBuffer):
    """A buffer for a trainer that streams: it gets groups as soon as the admitter has taken them and their rewards are
    there.  Of verl's asynchronous buffer it has what such a trainer asks for.

    Between two calls of :meth:`begin`: :meth:`wait_for_sampleable` and :meth:`sample` until the batch is there, then
    :meth:`end_step`.
    """

    def _stop(self) -> None:
        """End all that runs, and all that comes before the next step."""
        self._trainer.engines.stop_requests()

    @property
    def is_generated(self) -> bool:
        """Whether nothing of the step is under way in an engine any more; rewards may be."""
        return self._over

    def count_running(self) -> int:
        """Number of responses that have not ended, as the last look saw it."""
        return sum(map(len, self._under_way.values()))

    def count_spare(self) -> int:
        """Number of running responses that the batch can do without, if it takes each of the others."""
        rules, running = self._admitter.rules, self.count_running()
        ended = len(self._under_way) * rules.num_responses - running  # while their group goes on
        needed = (rules.num_prompts - len(self._taken)) * rules.num_responses - ended
        return max(running - max(needed, 1), 0)

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        self._look(global_steps, partition_id)
        return len(self._list_sampleable())

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> tuple[set[str], dict]:
        """Wait until ``target_count`` groups are there.

        Returns:
            uids of groups that are there; verl's figures of useless groups since the last call.
        """
        last = time.time()
        while self.get_sampleable_count(global_steps, partition_id) < target_count:
            last = self._wait_for_next_poll(partition_id, last)
        return set(self._list_sampleable()), self._take_evicted()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        """Take ``batch_size`` of the groups that are there.

        Raises:
            NoResponseError: all responses of these groups have failed.
        """
        if partition_id == "val":
            return ReplayBuffer.sample(self, global_steps, partition_id, batch_size)
        _, metrics = self.wait_for_sampleable(global_steps, partition_id, batch_size)
        chosen = self._list_sampleable()[:batch_size]
        self._given.update(chosen)
        batch = self._materialize_batch(partition_id, chosen, dict(self.partitions[partition_id]))
        if not batch.keys:
            _accumulate_eviction_metrics(self._evicted, metrics, 0)
            raise NoResponseError(len(chosen))
        return batch, metrics

    def _list_sampleable(self) -> list[str]:
        return [uid for uid in self._taken if uid not in self._unsettled and uid not in self._given]


class NoResponseError(RuntimeError):
    """The error of groups of which nothing can be trained on; the argument is the number of their prompts."""

    def __str__(self) -> str:
        return f"no response to train on: all {self.args[0]} prompts of the step have failed"


def _get_uids(keys: Iterable[str]) -> set[str]:
    """Uids of responses, by their keys, ``uid_session_index``."""
    return {key.split("_")[0] for key in keys}


def _collect_lengths(trajectories: Mapping[str, Mapping[str, Any]]) -> defaultdict[str, dict[int, int]]:
    """Number of tokens of each response that is there, by uid and session; keys are ``uid_session_index``.

    A key has no tag while verl is about to write the response.
    """
    lengths: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for key, tag in trajectories.items():
        uid, session, _ = key.rsplit("_", 2)
        if "response_len" in tag:
            lengths[uid][int(session)] = lengths[uid].get(int(session), 0) + tag["response_len"]
    return lengths
