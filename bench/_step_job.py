"""What the jobs of ``bench/rl_step.py`` have beside verl's and ours: programs in place of responses, and the times of
a step's stages (``step/...`` in verl's metrics)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import transfer_queue as tq
from _programs import MAXIMUM, make_response
from _stream_job import DrawnLengths, WholeStep
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer

from reward_sandbox.programs import score_response
from reward_sandbox.runs import Sandbox
from reward_sandbox.sandbox import make_sandbox
from sglang_pat.integrations.verl.rewards import PooledRewardManager
from sglang_pat.integrations.verl.stream_lent import AdaptiveStreamLent, LentRanks
from sglang_pat.integrations.verl.streaming import AdaptiveStream, StreamStep
from sglang_pat.integrations.verl.tail_batching import TailBatchingBuffer
from sglang_pat.integrations.verl.trainers import POLL_SECONDS, AdaptiveSync
from sglang_pat.messages import LIMIT_PARAM
from sglang_pat.policies.lending import FIRST_MILESTONE, Move

ENDED, SESSION = "ended", "session"
"""Extra fields of a response: when it was generated, by the machine's monotonic clock, and which of the prompt's."""

# -- programs -------------------------------------------------------------------------------------------------


@cache
def _get_sandbox() -> Sandbox:
    return make_sandbox(None)


def score_with_one_limit(ground_truth: Any, extra_info: Mapping[str, Any], **_: Any) -> float:
    """Reward function for verl's own manager: a program has :data:`MAXIMUM`, whatever others took."""
    response = make_response(int(extra_info["index"]), extra_info[SESSION])
    return score_response(response, ground_truth, _get_sandbox(), [MAXIMUM], maximum=MAXIMUM).value


class TimedLengths(DrawnLengths):
    """Policies are told the limit of a response, not its length."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        params = sampling_params | {"custom_params": {LIMIT_PARAM: self.response_length}}
        output = await super().run(params, **kwargs)
        output.extra_fields |= {ENDED: time.monotonic(), SESSION: int(kwargs["session_id"])}
        return output


# -- stages ---------------------------------------------------------------------------------------------------


def divide(begun: float, generated: float, ended: float, waits: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Seconds of a step by stage.

    Args:
        generated: time of its last response.
        waits: times in which its trainer had nothing to do, as (begin, end).
    """
    idle = sum(max(0.0, min(end, generated) - begin) for begin, end in waits)
    reward = sum(max(0.0, end - max(begin, generated)) for begin, end in waits)
    return {
        "generation": generated - begun,
        "reward": reward,
        "training": ended - generated - reward,
        "hidden": max(0.0, generated - begun - idle),
    }


_waits: list[tuple[float, float]] = []
"""Waits of the present step, as (begin, end) in seconds."""


def _note_waits(wait: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wait)
    def noted(*args: Any, **named: Any) -> Any:
        begun = time.monotonic()
        result = wait(*args, **named)
        _waits.append((begun, time.monotonic()))
        return result

    return noted


def _measure(step: Callable[..., KVBatchMeta]) -> Callable[..., KVBatchMeta]:
    @wraps(step)
    def measured(self: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        self.replay_buffer.poll_interval = POLL_SECONDS  # verl's two seconds are a tenth of a step here
        _waits.clear()
        begun = time.monotonic()
        batch = step(self, metrics, timing_raw)
        ended = time.monotonic()
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        fields = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        generated = max(field[ENDED] for field in fields.get("extra_fields").tolist())
        metrics |= {f"step/{name}": seconds for name, seconds in divide(begun, generated, ended, _waits).items()}
        return batch

    return measured


def _score_programs(compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compute)
    def compute_program(self: PooledRewardManager, **arguments: Any) -> Any:
        fields = arguments["extra_info"]
        return compute(self, **arguments | {"solution_str": make_response(int(fields["index"]), fields[SESSION])})

    return compute_program


# -- lent ranks -----------------------------------------------------------------------------------------------


class RanksNever(LentRanks):
    """Ranks of which none is lent."""

    def ask_policy(self, step: StreamStep, complete: int, groups: set[str]) -> dict[int, Move]:
        return {}


class RanksAtMilestone(LentRanks):
    """Ranks that are lent at the first milestone, whatever it gains."""

    def ask_policy(self, step: StreamStep, complete: int, groups: set[str]) -> dict[int, Move]:
        waiting = set(range(len(self._trainer.engines.list_actors()))) - self._lent.keys()
        return dict.fromkeys(waiting, Move.LEND) if complete >= FIRST_MILESTONE * step.batch else {}


@register_trainer("lent_never")
class LentNever(AdaptiveStreamLent):
    gpus_class = RanksNever


@register_trainer("lent_at_milestone")
class LentAtMilestone(AdaptiveStreamLent):
    gpus_class = RanksAtMilestone


for _owner in (ReplayBuffer, TailBatchingBuffer):  # those that stream wait in wait_for_groups
    _owner.sample = _note_waits(_owner.sample)
for _owner in (StreamStep, WholeStep):
    _owner.wait_for_groups = _note_waits(_owner.wait_for_groups)
for _owner in (AdaptiveSync, AdaptiveStream, AdaptiveStreamLent):
    _owner.step = _measure(_owner.step)
PooledRewardManager._compute = _score_programs(PooledRewardManager._compute)
