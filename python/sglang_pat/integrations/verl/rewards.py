"""verl's rewards with limits: ``reward.reward_manager.name=sglang_pat``.

verl's own manager reads a sample and calls the reward function.  Here the function runs in processes
(:mod:`sglang_pat.rewards.pool`), and not at all for responses that nobody will train on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.reward import get_custom_reward_fn

from sglang_pat.integrations.verl import reward_ledger
from sglang_pat.integrations.verl.fields import was_stopped
from sglang_pat.integrations.verl.options import NAME
from sglang_pat.rewards.pool import STARTS, Failure, Score, ScorePool

logger = logging.getLogger(__name__)

WHERE = f"reward.{NAME}"
"""Where our settings are."""
DEFAULTS = {"limit": 30.0, "failed_reward": 0.0, "processes": None, "start": STARTS[0]}
"""Of our settings.  ``processes``: of each of verl's reward workers; as many as its share of the machine's cores."""


def is_used(config: DictConfig) -> bool:
    """Whether a job asks for this manager."""
    manager = config.reward.reward_manager
    return manager.source == "register" and manager.name == NAME


def check(config: DictConfig) -> None:
    """Refuse, in one line, settings that cannot be, before anything is started; raises ValueError."""
    given = config.reward.get(NAME)
    if given is not None and not is_used(config):
        raise ValueError(
            f"{WHERE} is given, and reward.reward_manager.name is {config.reward.reward_manager.name}, must be {NAME}"
        )
    if is_used(config):
        _make_pool(config, abs)


def _make_pool(config: DictConfig, function: Callable[..., Any]) -> ScorePool:
    """For ``function``, with what :data:`WHERE` says; it starts nothing yet."""
    given = config.reward.get(NAME)
    if given is not None and not OmegaConf.is_dict(given):
        raise ValueError(f"{WHERE} is {given!r}, must be settings by name, e.g. {{limit: 30}}")
    unknown = sorted(set(given or {}) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"{WHERE} has no option {unknown[0]!r}; choose from {', '.join(DEFAULTS)}")
    found = DEFAULTS | dict(given or {})
    for name in ("limit", "failed_reward", "processes"):
        if isinstance(value := found[name], bool) or not isinstance(value, (int, float, type(DEFAULTS[name]))):
            raise ValueError(f"{WHERE}.{name} is {value!r}, must be a number")
    if found["processes"] is None:
        found["processes"] = max(1, len(os.sched_getaffinity(0)) // config.reward.num_workers)
    try:
        return ScorePool(function, **found)
    except ValueError as error:
        raise ValueError(f"{WHERE}.{error}") from None


@register(NAME)
class PooledRewardManager(NaiveRewardManager):
    """In each of verl's reward workers."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Callable[..., Any], **named: Any) -> None:
        super().__init__(config, tokenizer, compute_score, **named)
        function = self.compute_score
        if config.reward.custom_reward_function.path is not None and not self.is_async_reward_score:
            function = _OfFile(function, config)
        if self.reward_router_address is not None:  # the same in each call, and the tokenizer takes long to pickle
            function = functools.partial(
                function, reward_router_address=self.reward_router_address,
                reward_model_tokenizer=self.reward_model_tokenizer,
            )  # fmt: skip
            self.reward_router_address = None
        self._pool = _make_pool(config, function)
        self.compute_score, self.is_async_reward_score = self._score, True  # what verl's manager calls
        self._ledger = reward_ledger.connect()
        self._watch: asyncio.Task[None] | None = None
        self._dropped: frozenset[str] = frozenset()
        """Prompts on which nobody will train, by uid."""
        self._running: defaultdict[str, set[asyncio.Task[dict]]] = defaultdict(set)
        """By uid."""
        self._failed_info: dict[str, float] = {}
        self._told: set[Failure] = set()

    async def run_single(self, data: DataProto) -> dict:
        """The reward of a response; at once if it was stopped, or if nobody will train on its prompt."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_drops())
        fields = data[-1:][0].non_tensor_batch
        uid = str(fields["uid"])
        if uid in self._dropped or was_stopped(fields.get("tool_extra_fields") or {}):
            return self._skip()
        if "session_id" in fields:
            tokens = int(sum(data.non_tensor_batch["response_len"]))
            self._ledger.note_end.remote(uid, int(fields["session_id"]), tokens)
        task = asyncio.create_task(super().run_single(data))
        self._running[uid].add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if uid not in self._dropped:
                raise
            return self._skip()
        finally:
            self._running[uid].discard(task)
            if not self._running[uid]:
                del self._running[uid]

    async def _score(self, **arguments: Any) -> Mapping[str, Any] | float:
        score = await self._pool.score(**arguments)
        self._ledger.add_figures.remote(make_figures(score))
        if score.failure is not None:
            self._tell_once(score)
            return {"score": score.value} | self._failed_info if self._failed_info else score.value
        if not score.info:
            return score.value
        # What verl makes of a validation wants the same names of all samples.
        numbers = [name for name, value in score.info.items() if isinstance(value, (int, float))]
        self._failed_info = dict.fromkeys(numbers, self._failed_reward)
        return {**score.info, "score": score.value}

    def _skip(self) -> dict:
        self._ledger.add_figures.remote({"stopped": 1})
        return {"reward_score": 0.0, "reward_extra_info": {}}

    async def _watch_drops(self) -> None:
        known = 0
        while True:
            known, self._dropped = await self._ledger.wait_for_drop.remote(known)
            for uid in self._dropped & self._running.keys():
                for task in self._running[uid]:
                    task.cancel()
