"""A round on an engine (:class:`RolloutRound`): what the admitter wants is done, what the engine answers is told to
it.

The code serves an engine in this process (``Engine.rollout``) and one behind HTTP (``client.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from statistics import mean
from typing import Any

from sglang_pat.messages import BeginRound
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.calls import Calls
from sglang_pat.rollout.loop import EngineLoop
from sglang_pat.rollout.records import (  # fmt: skip
    Abort,
    Action,
    Group,
    Judge,
    Launch,
    NeedPrompts,
    Output,
    ReturnGroup,
    RoundOver,
    SampleId,
    Summary,
)
from sglang_pat.rollout.requests import Backend, Requests, check_params
from sglang_pat.rollout.rewards import Response, Reward, Rewards
from sglang_pat.rollout.state import LONG, SHORT
from sglang_pat.rollout.turns import ENVIRONMENT_SECONDS, Environment, EnvironmentCalls

logger = logging.getLogger(__name__)

SLICE = 16
"""Samples that are started or aborted in one turn of the event loop: each takes the engine 0.2 to 0.5 ms."""

ABORT_AGAIN_SECONDS = 0.5
"""An abort that overtakes its request is dropped by SGLang; it is sent again until the request is out."""

_process, _serial = uuid.uuid4().hex[:12], itertools.count()

Prompts = Sequence[tuple[Sequence[int], Any]]
"""Prompts as (key, prompt); see :meth:`Admitter.feed`."""

Verdicts = Callable[[Group], bool | Awaitable[bool]]
"""Whether a complete group is of use."""

MorePrompts = Callable[[int], Prompts | Awaitable[Prompts]]
"""A call for more prompts, given their number; fewer mean that there are no others for this round."""


def keep_every_group(group: Group) -> bool:
    """The verdict where nobody gives one."""
    return True


def give_no_prompts(count: int) -> Prompts:
    """The prompts where nobody gives any."""
    return []


class WeightsChanged(RuntimeError):
    """Weights were updated while a round was under way: it was cancelled, its prompts are where they were."""


class RolloutCalls(ABC):
    """What an engine in this process and the client of one have in common: ``rollout`` and ``async_rollout``."""

    @abstractmethod
    def _connect(self) -> AbstractAsyncContextManager[Backend]:
        """Connect one round to the engine."""

    @abstractmethod
    def _watch(self, round_: RolloutRound) -> None:
        """Have the round cancelled as soon as weights are updated, where somebody knows of that before its samples
        end."""

    async def async_rollout(
        self,
        admitter: Admitter,
        sampling_params: dict[str, Any],
        version: int,
        judge: Verdicts = keep_every_group,
        more: MorePrompts = give_no_prompts,
        environment: Environment | None = None,
        environment_seconds: float = ENVIRONMENT_SECONDS,
        reward: Reward | None = None,
    ) -> AsyncGenerator[Group | Summary, None]:
        """One round: its groups as they are completed, then its summary.

        Args:
            admitter: decides, and keeps what waits for another round; its prompts are ``{"input_ids": [...]}``.
            sampling_params: SGLang's, of every sample; ``max_new_tokens`` counts for a response, over all rounds and
                turns.
            version: version of the weights, as the training job counts it; every token returned carries it
                (``partial``: or an earlier one, not older than ``max_staleness``).
            judge: whether a complete group is of use; with ``filter_groups``.  Called as soon as the group is complete,
                in a thread of its own (:class:`~.calls.Calls`); with ``reward``, when it has its rewards.
            more: so many prompts, if the round could start some that were not fed: ``[((epoch, index), prompt), …]``.
                Fewer mean that there are no others for this round.  Called as ``judge`` is.
            environment: a coroutine function that answers the model when it has ended a turn
                (:mod:`~sglang_pat.rollout.turns`); without it that is the end of the sample.
            environment_seconds: longest that it may take for an answer.
            reward: what a response is worth; called as soon as the response has ended, as ``judge`` is
                (:mod:`~sglang_pat.rollout.rewards`).  ``sample.reward`` of what is returned; a group comes when it has
                all of them.

        Left before its summary, the round has not happened: its prompts are where they were.

        Raises:
            ValueError: too few prompts, what the engine refuses, or a reward that is no finite number; nothing of the
                round has happened.
            WeightsChanged: weights were updated meanwhile; the round was cancelled.
            ConnectionError: the server is gone, or does not answer; likewise.
        """
        params = check_params(sampling_params, admitter.rules.mode)
        if reward is not None and not callable(reward):
            raise ValueError(f"reward is {reward!r}, must be a function of a response (rollout/rewards.py)")
        turns = EnvironmentCalls(environment, environment_seconds) if environment is not None else None
        is_over = False
        async with self._connect() as backend:
            round_ = RolloutRound(admitter, backend, version, params, judge, more, turns, reward)
            self._watch(round_)
            try:
                async with aclosing(aiter(round_)) as events:
                    async for event in events:
                        is_over = isinstance(event, Summary)
                        yield event
            finally:
                round_.cancel()
                await round_.wait()
                if not is_over:
                    round_.undo()

    @abstractmethod
    def _loop_for_rounds(self) -> EngineLoop:
        """The loop for :meth:`rollout`; it runs in a thread until the round is over."""

    def rollout(self, *args: Any, **kwargs: Any) -> Iterator[Group | Summary]:
        """:meth:`async_rollout` for those without an event loop: one runs in a thread until the round is over.

        So the round goes on while an event is trained on.  Other methods of the engine work meanwhile, other rollouts
        too, each with an admitter of its own.  Between two events leave the admitter alone: the round changes it.

        Raises RuntimeError: the engine was made inside an event loop, which this would hold up.
        """
        yield from self._loop_for_rounds().iterate(self.async_rollout(*args, **kwargs))


class RolloutRound:
    """One round; iterate over it to get its groups as they are completed, then its summary.

    Left before its end (``aclose``), it is cancelled: what it had started is aborted in the background, see
    :meth:`wait`.  Who knows that nobody has read its end calls :meth:`undo`.
    """

    def __init__(
        self,
        admitter: Admitter,
        backend: Backend,
        version: int,
        params: dict[str, Any],
        judge: Verdicts = keep_every_group,
        more: MorePrompts = give_no_prompts,
        turns: EnvironmentCalls | None = None,
        reward: Reward | None = None,
    ) -> None:
        """Begin the round: to be called in the event loop.

        Args:
            version: version of the weights, as the training job counts it.
            params: sampling parameters of all samples.
            turns: samples go on when the model has ended a turn; None: that ends them.

        Raises ValueError or RuntimeError: see :meth:`Admitter.begin`; nothing was started.
        """
        if turns is not None and admitter.rules.unbiased:
            raise ValueError("unbiased is true, must be false with turns: what defers a prompt is time, not tokens")
        self.admitter = admitter
        self.summary: Summary | None = None
        self.name = f"round-{_process}-{next(_serial)}-"
        """Text that the request ids of this round begin with."""
        self._backend = backend
        self._requests = Requests(backend, self.name, version, params, turns)
        self._events: asyncio.Queue[Group | Summary | Exception] = asyncio.Queue()
        self._tasks: dict[SampleId, asyncio.Task[None]] = {}
        self._stopping: set[SampleId] = set()
        self._queue: deque[Launch | Abort] = deque()
        self._slice: asyncio.Handle | None = None
        self._rewards = Rewards(reward, self._record_reward, self._fail) if reward is not None else None
        self._callbacks, self._turns = Callbacks(self, judge, more, self._rewards), turns
        self._begun = asyncio.get_running_loop().time()
        self._error: Exception | None = None
        self._over = asyncio.Event()
        self._again: asyncio.Task[None] | None = None
        actions = admitter.begin(version)
        self._before = admitter.before
        self._updates: int | None = None
        """Weight updates before the first sample; None: the engine has not been told of the round yet."""
        self._telling = asyncio.ensure_future(self._tell(params))
        self._do(actions)

    def tell(self, call: Callable[..., list[Action]], *arguments: Any) -> None:
        """Tell the admitter something, by one of its methods; nothing happens if the round is over."""
        if self.summary is None:
            self._do(call(*arguments))

    def undo(self) -> None:
        """Undo a round that is over and that nobody has read: its prompts are where they were.  Those that came during
        the round stay, too: whoever gave them was told that they were taken."""
        if self.summary is not None and not self.summary.cancelled:
            self.admitter.restore(self._before)

    def cancel_for_new_weights(self) -> None:
        """Cancel the round as weights were updated; whoever iterates gets :class:`WeightsChanged`."""
        self.fail(WeightsChanged("weights were updated during a round: it was cancelled, nothing of it counts"))

    def fail(self, error: Exception) -> None:
        """Cancel the round; whoever iterates gets the first such error."""
        if self.summary is None:
            self._fail(error)

    def cancel(self) -> None:
        """Abort what runs; the round will not have happened."""
        if self._rewards is not None:
            self._rewards.stop()
        self.tell(self.admitter.cancel)

    async def wait(self) -> None:
        """Wait until the engine has nothing of this round any more."""
        await self._over.wait()

    async def __aiter__(self) -> AsyncGenerator[Group | Summary, None]:
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                if self._error is None:
                    yield event
                if isinstance(event, Summary):
                    return
        finally:
            self.cancel()

    # -- inside ----------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """End the round with an error, also when the engine has nothing of it any more and rewards are waited for."""
        if self._error is None:
            self._error = error
            self.cancel()

    def _record_reward(self, sample: SampleId, reward: float) -> None:
        self.tell(self.admitter.record_reward, sample, reward)

    async def _tell(self, params: dict[str, Any]) -> None:
        """Tell the engine that the round begins, before any of its samples."""
        try:
            await self._backend.begin_round(make_announcement(self.admitter, self.name, params))
        except Exception as error:
            self.fail(error)
        self._updates = self._backend.count_updates()
        self._do([])

    def _do(self, actions: list[Action]) -> None:
        """Tell whoever iterates at once; samples are started and aborted a slice at a time, in their order."""
        for action in actions:
            match action:
                case Launch():
                    self._queue.append(action)
                case Abort(sample):
                    self._queue.append(action)
                    self._stopping.add(sample)
                case Judge(group):
                    self._decode(sample.output for sample in group.list_kept())
                    self._callbacks.judge(group.copy_for_changes())  # the end of the round may change ours
                case NeedPrompts(prompts):
                    self._callbacks.feed(prompts)
                case ReturnGroup(group):
                    self._decode(sample.output for sample in group.list_kept())
                    if self._rewards is None:
                        self._events.put_nowait(group)
                    else:
                        self._rewards.deliver(group, self._events.put_nowait)
                case RoundOver(summary):
                    seconds = asyncio.get_running_loop().time() - self._begun
                    self.summary = self.admitter.record_round_time(summary, seconds)
                    self._callbacks.stop()
                    if self._rewards is not None:
                        self._rewards.cancel_others()
                    self._ending = asyncio.ensure_future(self._end(self.summary))
        if self._queue and self._updates is not None and self.summary is None and self._slice is None:
            self._slice = asyncio.get_running_loop().call_soon(self._run_next_chunk)

    def _decode(self, outputs: Iterable[Output]) -> None:
        """Decode responses that came in pieces; the round ends where the tokenizer cannot."""
        try:
            self._requests.decode(outputs)
        except Exception as error:
            self.fail(error)

    async def _end(self, summary: Summary) -> None:
        """Tell the engine that it has nothing of the round any more, then, when all rewards are there, whoever
        iterates."""
        await asyncio.wait([self._telling])  # a round may be over as soon as it begins
        try:
            await self._backend.end_round(self.name)
        except Exception as error:
            logger.warning("the engine was not told that a round is over: %s", error)
        if self._rewards is not None:
            await self._rewards.wait()
        self._events.put_nowait(self._error or summary)
        self._over.set()

    def _run_next_chunk(self) -> None:
        """Start and abort what is queued, a slice of it, then let others have the event loop."""
        self._slice = None
        if self.summary is not None:
            return
        unstarted: list[SampleId] = []
        for _ in range(min(SLICE, len(self._queue))):
            match self._queue.popleft():
                case Launch(sample, prompt, prefix):
                    if sample in self._stopping:
                        unstarted.append(sample)
                    else:
                        self._tasks[sample] = asyncio.ensure_future(self._sample(sample, prompt, prefix))
                case Abort(sample):
                    if sample in self._tasks and not (self._turns and self._turns.stop(sample)):
                        self._backend.abort(self._requests.make_rid(sample))
                        self._again = self._again or asyncio.ensure_future(self._abort_again())
        for sample in unstarted:  # the engine never had it
            self._stopping.discard(sample)
            self._do(self.admitter.record_stopped(sample, Output()))
        self._do([])

    async def _sample(self, sample: SampleId, prompt: Any, prefix: Output | None) -> None:
        output = Output()
        try:
            goes_on = True
            while goes_on and sample not in self._stopping:
                so_far = prefix.concatenate(output) if prefix else output
                step = await self._requests.generate_segment(
                    sample, prompt, so_far if so_far.token_ids or so_far.asked else None
                )
                if self._backend.count_updates() != self._updates:
                    self.cancel_for_new_weights()
                    break  # it is of more than one version, nobody knows which token is whose
                output = output.concatenate(step)
                goes_on = not step.finish_reason and (step.asked or any(span.version is None for span in step.spans))
        except Exception as error:  # whatever it is, this round cannot be, and no prompt may be lost
            self.fail(error)
        del self._tasks[sample]
        is_wanted = sample not in self._stopping
        self._stopping.discard(sample)
        if not output.finish_reason:
            self._do(self.admitter.record_stopped(sample, output))
            return
        actions = self.admitter.record_finished(sample, output)
        if is_wanted and self._rewards is not None:
            self._reward(self._rewards, sample, prompt, prefix.concatenate(output) if prefix else output)
        self._do(actions)

    def _reward(self, rewards: Rewards, sample: SampleId, prompt: Any, output: Output) -> None:
        """Have a response rewarded that has ended, unless its group has no use for it, or for others any more."""
        chosen = self.admitter.list_chosen(sample.key)
        if chosen is None:  # that was the end of the round: whoever delivers the group asks
            return
        if sample.number in chosen:
            self._decode([output])
            rewards.begin(Response(sample=sample, prompt=prompt, output=output))
        rewards.keep_only(sample.key, chosen)

    async def _abort_again(self) -> None:
        seconds = ABORT_AGAIN_SECONDS
        while not self._over.is_set():
            try:
                await asyncio.wait_for(self._over.wait(), seconds)
            except TimeoutError:
                seconds = min(2 * seconds, 32 * ABORT_AGAIN_SECONDS)
                self._queue.extend(Abort(sample) for sample in self._stopping)
                self._do([])


class Callbacks:
    """Asks the training job for verdicts and prompts, as soon as a round needs them (:class:`~.calls.Calls`).

    What its functions raise ends the round.
    """

    def __init__(self, round_: RolloutRound, verdicts: Verdicts, more: MorePrompts, rewards: Rewards | None) -> None:
        self._round, self._verdicts, self._more, self._rewards = round_, verdicts, more, rewards
        self._calls = Calls("rollout callbacks")
        self._tasks: set[asyncio.Task[None]] = set()

    def judge(self, group: Group) -> None:
        """Have a group judged."""
        self._begin(self._judge_group, group)

    def feed(self, count: int) -> None:
        """Have so many prompts fed."""
        self._begin(self._feed_prompts, count)

    def stop(self) -> None:
        """Stop the calls under way, whose answers nobody needs any more."""
        for task in self._tasks:
            task.cancel()
        self._calls.stop()

    def _begin(self, call: Callable[[Any], Awaitable[None]], argument: Any) -> None:
        task = asyncio.ensure_future(self._call_or_fail(call, argument))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call_or_fail(self, call: Callable[[Any], Awaitable[None]], argument: Any) -> None:
        try:
            await call(argument)
        except asyncio.CancelledError as error:
            if self._round.summary is None:  # not by stop(): what it waited for was
                self._round.fail(RuntimeError(f"a callback was cancelled: {error}"))
            raise
        except Exception as error:
            self._round.fail(error)

    async def _judge_group(self, group: Group) -> None:
        if self._rewards is not None:
            await self._rewards.fill(group)
        keep = await self._calls.call(self._verdicts, group)
        self._round.tell(self._round.admitter.record_verdict, group.key, keep)

    async def _feed_prompts(self, count: int) -> None:
        prompts = await self._calls.call(self._more, count)
        self._round.tell(self._round.admitter.feed, prompts)
        if len(prompts) < count:
            self._round.tell(self._round.admitter.end_prompts)


def make_announcement(admitter: Admitter, name: str, params: dict[str, Any]) -> BeginRound:
    """What the engine is told of a round that has just begun.

    How many samples there will be is not known where groups are filtered, and where samples go on that were stopped.
    """
    state, rules, begun = admitter.state, admitter.rules, admitter.state.round
    fields: dict[str, Any] = {"max_new_tokens": params["max_new_tokens"]} if "max_new_tokens" in params else {}
    if begun is None:  # and over
        return BeginRound(name=name, **fields)
    fields["kind"] = SHORT if begun.kind == SHORT else LONG  # the rest of an epoch runs to its end, too
    prompts = [group.prompt for group in (*begun.groups, *begun.taken, *state.fresh)]
    lengths = [len(prompt["input_ids"]) for prompt in prompts if prompt and "input_ids" in prompt]
    fields |= {"prompt_tokens": round(mean(lengths))} if lengths else {}
    if rules.filter_groups or rules.mode == "partial":
        return BeginRound(name=name, **fields)
    available = len(begun.groups) + len(begun.taken) + len(state.waiting) + state.count_fresh(begun.epoch)
    count = min(begun.prompts, available)
    return BeginRound.of_size(count, begun.responses, name=name, **fields)
