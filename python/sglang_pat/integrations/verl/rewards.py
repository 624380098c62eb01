"""verl's rewards with limits: ``reward.reward_manager.name=sglang_pat``.

verl's own manager reads a sample and calls the reward function.  Here the function runs in processes
(:mod:`reward_sandbox.pool`), programs run in a sandbox, and nothing runs for a response that nobody will train on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, cast
from weakref import WeakSet

from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.protocol import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn

from reward_sandbox.limits import LimitRules
from reward_sandbox.pool import STARTS, Failure, Reward, RewardPool
from reward_sandbox.sandbox import make_sandbox
from sglang_pat.integrations.verl import reward_ledger
from sglang_pat.integrations.verl.fields import MISSING
from sglang_pat.integrations.verl.options import NAME
from sglang_pat.integrations.verl.reward_ledger import Prompt
from sglang_pat.integrations.verl.reward_programs import SOURCES, ProgramScorer

logger = logging.getLogger(__name__)

WHERE = f"reward.{NAME}"
"""Option that holds our settings."""
POOL = {"limit": 30.0, "failed_reward": 0.0, "processes": None, "extra": 32, "memory": 4 << 30, "start": STARTS[0]}
"""Settings of :class:`RewardPool`, and their defaults; ``processes`` of each of verl's reward workers: its share of the
machine's cores."""
OTHERS = ("sandbox", "time_limits", "all_or_nothing")


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Settings of a job's rewards.

    Attributes:
        pool: arguments of :class:`RewardPool`.
        rules: rules of a program's time limits.
        sandbox: setting of the sandbox, as :func:`make_sandbox` takes it.
        all_or_nothing: whether a program that is wrong in one case is worth nothing; verl's function gives the share.
    """

    pool: Mapping[str, Any]
    rules: LimitRules
    sandbox: str | Mapping[str, Any] | None
    all_or_nothing: bool


def is_used(config: DictConfig) -> bool:
    """Whether a job asks for this manager."""
    manager = config.reward.reward_manager
    return manager.source == "register" and manager.name == NAME


def read_settings(config: DictConfig) -> RewardSettings:
    """The settings in :data:`WHERE`.

    Raises:
        ValueError: an unknown setting, or a value that cannot be; one line.
    """
    reward = OmegaConf.to_container(config.reward, resolve=True)
    own = _read_mapping(reward.get(NAME) if isinstance(reward, Mapping) else None, WHERE, "{limit: 30}")
    _refuse_unknown(own, [*POOL, *OTHERS], WHERE)
    pool = POOL | {name: value for name, value in own.items() if name in POOL}
    if pool["processes"] is None:
        pool["processes"] = max(1, len(os.sched_getaffinity(0)) // config.reward.num_workers)
    _refuse_words({name: value for name, value in pool.items() if name != "start"}, WHERE)
    limits = _read_mapping(own.get("time_limits"), f"{WHERE}.time_limits", "{maximum: 30}")
    _refuse_unknown(limits, LimitRules.__dataclass_fields__, f"{WHERE}.time_limits")
    _refuse_words(limits, f"{WHERE}.time_limits")
    try:
        RewardPool(abs, **pool)  # starts nothing
        rules = LimitRules(**limits)
    except ValueError as error:
        raise ValueError(f"{WHERE}: {error}") from None
    if not isinstance(all_or_nothing := own.get("all_or_nothing", False), bool):
        raise ValueError(f"{WHERE}.all_or_nothing is {all_or_nothing!r}, must be true or false")
    return RewardSettings(pool=pool, rules=rules, sandbox=own.get("sandbox"), all_or_nothing=all_or_nothing)


def read_limit_rules(config: DictConfig) -> LimitRules:
    """The rules of time limits, in any job: without this manager there are no programs, and they do not matter."""
    return read_settings(config).rules if is_used(config) else LimitRules()


def get_filter_metric(config: DictConfig) -> str | None:
    """The number beside the score by which verl's filter judges a group; None: it takes the score, or there is none."""
    groups = config.algorithm.get("filter_groups") or {}
    return groups["metric"] if groups.get("enable") and groups["metric"] != "reward" else None


def _read_mapping(settings: Any, where: str, example: str) -> dict[str, Any]:
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where} is {settings!r}, must be settings by name, e.g. {example}")
    return dict(settings)


def _refuse_unknown(names: Iterable[str], choices: Iterable[str], where: str) -> None:
    for name in sorted(set(names) - set(choices)):
        raise ValueError(f"{where} has no setting {name!r}; choose from {', '.join(choices)}")


def _refuse_words(settings: Mapping[str, Any], where: str) -> None:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{where}.{name} is {value!r}, must be a number")


def runs_programs(config: DictConfig, sources: Iterable[str]) -> bool:
    """Whether verl's own reward function is in use, and would run programs on this machine for one of these sources."""
    reward = config.reward
    own = reward.custom_reward_function.path is not None or (reward.sandbox_fusion or {}).get("url")
    return not own and not SOURCES.isdisjoint(sources)


def check(config: DictConfig) -> None:
    """Refuse what cannot be, in one line, before anything is started; raises ValueError."""
    if is_used(config):
        read_settings(config)
    elif config.reward.get(NAME) is not None:
        name = config.reward.reward_manager.name
        raise ValueError(f"{WHERE} is given and reward.reward_manager.name is {name!r}, must be {NAME!r}")


def check_sandbox(config: DictConfig, sources: Iterable[str]) -> None:
    """Refuse data whose programs need a sandbox that does not work on this machine; raises ValueError."""
    if is_used(config) and runs_programs(config, sources):
        make_sandbox(read_settings(config).sandbox, f"{WHERE}.sandbox")


@register(NAME)
class PooledRewardManager(NaiveRewardManager):
    """The reward manager of each of verl's reward workers."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Callable[..., Any], **named: Any) -> None:
        super().__init__(config, tokenizer, compute_score, **named)
        self._settings = read_settings(config)
        self._ledger = reward_ledger.connect(self._settings.rules)
        self._pool = RewardPool(self._make_function(), **self._settings.pool)
        self._programs: ProgramScorer | None = None
        """Scorer of programs; made with the first one."""
        # What verl's manager calls, and with what.
        self.compute_score, self.is_async_reward_score, self.reward_router_address = self._compute, True, None
        self._watch: asyncio.Task[None] | None = None
        self._dropped: frozenset[Prompt] = frozenset()
        """Prompts that nobody will train on."""
        self._running: defaultdict[Prompt, set[asyncio.Task[dict]]] = defaultdict(set)
        self._failed: WeakSet[asyncio.Task[dict]] = WeakSet()
        """Tasks whose function gave no reward."""
        self._names = {metric} if (metric := get_filter_metric(config)) else set[str]()
        """Names of the numbers that the function returns beside the score: verl wants all samples to have them."""
        self._told: set[Failure] = set()

    def _make_function(self) -> Callable[..., Any]:
        function = self.compute_score
        if self._settings.pool["start"] == "spawn" and self.config.reward.custom_reward_function.path is not None:
            function = function if self.is_async_reward_score else _FromFile(function, self.config)
        if self.reward_router_address is None:
            return function
        # The same in each call; the tokenizer takes long to pickle.
        router, tokenizer = self.reward_router_address, self.reward_model_tokenizer
        return functools.partial(function, reward_router_address=router, reward_model_tokenizer=tokenizer)

    async def run_single(self, data: DataProto) -> dict:
        """The reward of a response; at once if nobody will train on its prompt."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_drops())
        fields = data[-1:][0].non_tensor_batch
        prompt = int(fields.get("global_steps", -1)), str(fields.get("uid"))
        if prompt in self._dropped:
            return self._skip()
        task = asyncio.create_task(super().run_single(data))
        self._running[prompt].add(task)
        try:
            reward = await task
            if task in self._failed:
                reward["reward_extra_info"][MISSING] = True
            return reward
        except asyncio.CancelledError:
            if prompt not in self._dropped:
                raise
            return self._skip()
        finally:
            self._running[prompt].discard(task)
            if not self._running[prompt]:
                del self._running[prompt]

    async def _compute(self, **arguments: Any) -> Mapping[str, Any] | float:
        """Stand in for the reward function: compute its result in a process or in the sandbox."""
        if runs_programs(self.config, [arguments["data_source"]]):
            reward = await self._score_program(arguments)
        else:
            reward = await self._pool.score(arguments)
            self._add_figures("scoring", reward)
        if reward.failure is not None:
            self._tell_once(reward)
            self._failed.add(cast(asyncio.Task[dict], asyncio.current_task()))
            others = {name: reward.value for name in self._names}
            return {**others, "score": reward.value} if others else reward.value
        if not reward.info:
            return reward.value
        self._names |= {name for name, value in reward.info.items() if isinstance(value, Real)}
        return {**reward.info, "score": reward.value}

    async def _score_program(self, arguments: Mapping[str, Any]) -> Reward:
        if self._programs is None:
            own = self._settings
            sandbox = make_sandbox(own.sandbox, f"{WHERE}.sandbox")
            self._programs = ProgramScorer(sandbox, own.rules, own.all_or_nothing, self._ledger, own.pool)
        reward = await self._programs.score(arguments["solution_str"], arguments["ground_truth"])
        self._add_figures("sandbox", reward)
        return replace(reward, info={})  # as verl's function, which gives the score alone

    def _add_figures(self, part: str, reward: Reward) -> None:
        whole = reward.waiting + reward.running
        figures = {
            "responses": 1, "seconds/waiting": reward.waiting, f"seconds/{part}": reward.running, "seconds/max": whole
        }  # fmt: skip
        if reward.failure is not None:
            figures[f"failed/{reward.failure}"] = 1
        self._ledger.add_figures.remote(figures)

    def _tell_once(self, reward: Reward) -> None:
        """Log the first failure of each kind; how many there are is in the job's metrics."""
        assert reward.failure is not None
        if reward.failure not in self._told:
            self._told.add(reward.failure)
            logger.error(
                "reward function %s (%s): such a sample gets %g; further ones are counted in reward/failed/%s",
                reward.failure, reward.reason, reward.value, reward.failure,
            )  # fmt: skip

    def _skip(self) -> dict:
        self._ledger.add_figures.remote({"stopped": 1})
        value = self._settings.pool["failed_reward"]
        return {"reward_score": value, "reward_extra_info": dict.fromkeys(self._names, value) | {MISSING: True}}

    async def _watch_drops(self) -> None:
        number = 0
        while True:
            number, self._dropped = await self._ledger.wait_for_drop.remote(number)
            for prompt in self._dropped & self._running.keys():
                for task in self._running[prompt]:
                    task.cancel()


class _FromFile:
    """A function of a user's file: a process that unpickles it reads the file."""

    def __init__(self, function: Callable[..., Any], config: DictConfig) -> None:
        self._function = function
        custom = OmegaConf.to_container(config.reward.custom_reward_function, resolve=True)
        self._config = OmegaConf.create({"reward": {"custom_reward_function": custom}})

    def __call__(self, **arguments: Any) -> Any:
        return self._function(**arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return get_custom_reward_fn, (self._config,)
