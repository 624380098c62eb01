"""Rewards of programs, which verl's own function runs in a child process, with nothing between them and the machine.

Here they run in a sandbox, and the limits of their test cases are common to all of verl's reward workers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ray.actor import ActorHandle

from reward_sandbox import programs
from reward_sandbox.limits import LimitRules, TimeLimits
from reward_sandbox.pool import Failure, Reward, RewardPool
from reward_sandbox.runs import Sandbox
from sglang_pat.errors import format_one_line

SOURCES = frozenset(("apps", "codecontests", "codeforces", "taco"))
"""Sources of data for which verl's function runs programs."""
SPARE_SECONDS = 30.0
"""Seconds that a response has beyond the limits of its test cases, to start the sandbox on a busy machine."""
LOWEST_PRIORITY = 19


class ProgramScorer:
    """The scorer of programs in each of verl's reward workers.

    Args:
        rules: rules of the time limits.
        all_or_nothing: whether a response is worth 1 or 0, else the share of the test cases that are right.
        ledger: actor that has the limits (:class:`~.reward_ledger.RewardLedger`).
        pool: arguments of :class:`RewardPool`.
    """

    def __init__(
        self, sandbox: Sandbox, rules: LimitRules, all_or_nothing: bool, ledger: ActorHandle, pool: Mapping[str, Any]
    ) -> None:
        self._ledger, self._maximum, self._failed_reward = ledger, rules.maximum, pool["failed_reward"]
        self._told = TimeLimits(rules)
        """Time limits as this worker has told the ledger since the job's start."""
        self._life = ""
        self._fixed = {"sandbox": sandbox, "maximum": rules.maximum}
        self._pool = RewardPool(functools.partial(_score, all_or_nothing=all_or_nothing), **pool)
        # What is cut is run again in idle time: the kernel's, and so it never takes a core from a reward.
        alone: dict[str, Any] = {**pool, "processes": 1, "nice": LOWEST_PRIORITY}
        self._idle = RewardPool(_run_again, **alone)
        self._reruns: set[asyncio.Task[None]] = set()

    async def score(self, response: str, ground_truth: Any) -> Reward:
        """Reward of a response's program."""
        try:
            keys = programs.get_keys(ground_truth)
        except ValueError as error:
            return Reward(value=self._failed_reward, failure=Failure.INVALID, reason=format_one_line(error))
        task = self._fixed | {"response": response, "ground_truth": ground_truth}
        # The sandbox keeps the limits.  This one is for a sandbox that hangs.
        most = len(keys) * self._maximum + SPARE_SECONDS
        # They are asked for late: while this one waits, others tell how long a right answer takes.
        reward = await self._pool.score(task, most, functools.partial(self._get_limits, keys))
        if reward.failure is not None:
            return reward
        runs = reward.info["runs"]
        self._told.record(runs)
        for index, again in enumerate(await self._ledger.record_runs.remote(runs)):
            if again:
                rerun = asyncio.create_task(self._run_again(task | {"index": index}))
                self._reruns.add(rerun)
                rerun.add_done_callback(self._reruns.discard)
        return reward

    async def _get_limits(self, keys: Sequence[str]) -> dict[str, Sequence[float]]:
        previous_life = self._life  # before it asks: of several that ask a new ledger at once, none has a full answer
        life, limits = await self._ledger.get_limits.remote(keys)
        if life == previous_life:
            return {"time_limits": limits}
        self._life = life
        await self._ledger.restore_limits.remote(self._told.state_dict())
        return {"time_limits": (await self._ledger.get_limits.remote(keys))[1]}

    async def _run_again(self, task: Mapping[str, Any]) -> None:
        reward = await self._idle.score(task, programs.PATIENCE * self._maximum + SPARE_SECONDS)
        if reward.failure is None:
            runs = [reward.info["run"]]
            self._told.record(runs)
            await self._ledger.record_runs.remote(runs)


# -- in a process ------------------------------------------------------------------------------------------


def _score(all_or_nothing: bool, **task: Any) -> dict[str, Any]:
    score = programs.score_response(**task, all_or_nothing=all_or_nothing)
    return {"score": score.value, "runs": score.runs}


def _run_again(**task: Any) -> dict[str, Any]:
    return {"score": 0.0, "run": programs.run_again(**task)}
