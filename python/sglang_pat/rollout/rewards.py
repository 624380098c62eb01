"""Rewards of a round's responses (:class:`Rewards`), asked for when a response ends, not when its group is complete.

A response that has ended may still be thrown away: with its group (``strict``, ``reorder``), or with its draw
(``unbiased``).  Then its reward is not waited for: it is cancelled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Any, SupportsFloat, cast

import msgspec

from sglang_pat.rollout.calls import Calls
from sglang_pat.rollout.missing import MISSING, Missing
from sglang_pat.rollout.records import Group, Output, PromptKey, SampleId


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response that has ended.

    Attributes:
        prompt: the prompt, as it was fed.
        output: all of the response, whatever rounds and turns it came in.
    """

    sample: SampleId
    prompt: Any
    output: Output


Reward = Callable[[Response], "float | Missing | Awaitable[float | Missing]"]
"""What a response is worth, a finite number, or :data:`MISSING`; called as :class:`~.calls.Calls` says."""


class Rewards:
    """The rewards of one round.

    Args:
        record: is told of each.
        fail: is told of what a reward raised, and of what is no reward.
    """

    def __init__(
        self, reward: Reward, record: Callable[[SampleId, float], None], fail: Callable[[Exception], None]
    ) -> None:
        self._reward, self._record, self._fail = reward, record, fail
        self._calls = Calls("rollout rewards")
        self._tasks: dict[PromptKey, dict[int, asyncio.Task[float | None]]] = {}
        """Tasks by the number of the response."""
        self._deliveries: dict[PromptKey, asyncio.Task[None]] = {}
        self._stopped = False

    def begin(self, response: Response) -> None:
        """Ask for the reward of a response."""
        if not self._stopped:
            task = asyncio.ensure_future(self._ask(response))
            self._tasks.setdefault(response.sample.key, {})[response.sample.number] = task

    def keep_only(self, key: PromptKey, numbers: Collection[int]) -> None:
        """Stop the rewards of the other responses to this prompt, which were thrown away."""
        tasks = self._tasks.get(key, {})
        for number in [number for number in tasks if number not in numbers]:
            tasks.pop(number).cancel()

    async def fill(self, group: Group) -> None:
        """Wait for the rewards of a complete group, and put them into it.

        Raises CancelledError: nobody wants them any more.
        """
        self.keep_only(group.key, group.chosen)
        kept = [sample for sample in group.list_kept() if sample.reward is None]
        for sample in kept:
            if sample.number not in self._tasks.get(group.key, {}):  # of an earlier round, whose end cancelled it
                self.begin(Response(sample=group.get_sample_id(sample), prompt=group.prompt, output=sample.output))
        if self._stopped:
            raise asyncio.CancelledError("the round was cancelled")
        tasks = [self._tasks[group.key][sample.number] for sample in kept]
        if tasks:
            await asyncio.wait(tasks)  # not gather: cancelled, it waits for those that do not listen
        for sample, task in zip(kept, tasks, strict=True):
            sample.reward = task.result()

    def deliver(self, group: Group, deliver: Callable[[Group], None]) -> None:
        """Have a group of the batch delivered as soon as it has its rewards."""

        async def wait() -> None:
            await self.fill(group)
            deliver(group)

        self._deliveries[group.key] = asyncio.ensure_future(wait())

    def cancel_others(self) -> None:
        """Wait only for the rewards of the batch's groups, as the batch is complete."""
        for key in self._tasks.keys() - self._deliveries.keys():
            self.keep_only(key, ())

    async def wait(self) -> None:
        """Wait until every group of the batch is delivered, or nobody wants it any more."""
        if self._deliveries:
            await asyncio.wait(self._deliveries.values())
        self.stop()  # of draws that the last response has rejected: nobody is to hear of them any more

    def stop(self) -> None:
        """Stop all rewards: nobody wants any of them any more, nor waits for them."""
        self._stopped = True
        for key in self._tasks:
            self.keep_only(key, ())
        for delivery in self._deliveries.values():
            delivery.cancel()
        self._calls.stop()

    async def _ask(self, response: Response) -> float | None:
        try:
            value = await self._calls.call(self._reward, response)
            if value is MISSING:
                return None
            reward = check_reward(value, response.sample)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # not by us: what it waited for was
                self._fail(RuntimeError(f"a reward was cancelled: {error}"))
            raise
        except Exception as error:
            self._fail(error)
            return math.nan
        self._record(response.sample, reward)
        return reward


def check_reward(value: object, sample: SampleId) -> float:
    """What a reward function returned, as a number.  Raises ValueError: one line, it is none, or not finite."""
    try:
        reward = math.nan if isinstance(value, str | bytes) else float(cast(SupportsFloat, value))
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        what = f"the reward of response {sample.number} to prompt {list(sample.key)}"
        raise ValueError(f"{what} is {str(value)[:80]!r}, must be a finite number")
    return reward
