"""A round on an engine: what the admitter wants is done, what the engine answers is told to it.

The same code wherever the admitter is: in the server (``sglang/server/rollout.py``), in the process of an ``Engine``,
or in a client of a server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from sglang_pat.admission.admitter import Admitter
from sglang_pat.admission.records import (
    Abort,
    Action,
    Group,
    Judge,
    Launch,
    Output,
    Return,
    RoundOver,
    SampleId,
    Span,
    Summary,
)  # fmt: skip
from sglang_pat.messages import GENERATED_PARAM

ABORT_AGAIN_SECONDS = 0.5
"""An abort that overtakes its request is dropped by SGLang; it is sent again until the request is out."""

RID_PREFIX = "pat-"
"""What the ids of a round's requests begin with; no client may use it."""

SLICE = 16
"""Samples that are started or aborted in one turn of the event loop: each takes the server some 0.2 to 0.5 ms."""

_serial = itertools.count()


class Backend(Protocol):
    """An engine."""

    def updates(self) -> int:
        """Weight updates so far."""
        ...

    async def generate(self, rid: str, prompt: Any, params: dict[str, Any]) -> Output:
        """What was generated, without ``spans``; without ``finish_reason`` if it did not end by itself.

        Raises:
            Exception: the engine refuses the prompt, or is gone.
        """
        ...

    def abort(self, rid: str) -> None:
        """Stop it; :meth:`generate` returns what there is."""

    def text(self, token_ids: list[int]) -> str:
        """Of a response that came in pieces."""
        ...


class WeightsChanged(RuntimeError):
    """Weights were updated while a round was under way: it was cancelled, its prompts are where they were."""


class RolloutRound:
    """One round; iterate over it to get its groups as they are completed, then its summary.

    ``Judge`` comes before a group is returned if groups are filtered: answer with :meth:`judge`.  Left before its end
    (``aclose``), it is cancelled: what it had started is aborted in the background, see :meth:`wait`.
    """

    def __init__(self, admitter: Admitter, backend: Backend, version: int, params: dict[str, Any]) -> None:
        """Begin the round: to be called in the event loop.

        Args:
            version: of the weights, as the training job counts them.
            params: sampling parameters of all samples.

        Raises:
            ValueError, RuntimeError: see :meth:`Admitter.begin`; nothing was started.
        """
        self.admitter = admitter
        self.version = version
        self.summary: Summary | None = None
        self._backend = backend
        self._params = params
        self.name = f"{RID_PREFIX}{next(_serial)}-"
        """What request ids of this round begin with."""
        self._events: asyncio.Queue[Group | Judge | Summary | Exception] = asyncio.Queue()
        self._tasks: dict[SampleId, asyncio.Task] = {}
        self._stopping: set[SampleId] = set()
        self._queue: deque[Launch | Abort] = deque()
        self._slice: asyncio.Handle | None = None
        self._judging: set[tuple[int, ...]] = set()
        self._updates = backend.updates()
        self._error: Exception | None = None
        self._over = asyncio.Event()
        self._again: asyncio.Task | None = None
        actions = admitter.begin(version, most=SLICE)
        over = [action.summary.kind for action in actions if isinstance(action, RoundOver)]
        begun = admitter.state.round
        self.kind = begun.kind if begun else over[0]
        self._taken = begun.taken if begun else []
        self._do(actions)

    def judge(self, key: Sequence[int], keep: bool, reward: float | None = None) -> None:
        """The verdict on a group.

        Raises:
            ValueError: none is awaited for it.
        """
        if tuple(key) not in self._judging:
            raise ValueError(f"key is {list(key)}, verdicts are awaited for {sorted(map(list, self._judging))}")
        self._judging.remove(tuple(key))
        if self.summary is None:
            self._do(self.admitter.judged(key, keep, reward))

    def weights_changed(self) -> None:
        """Weights were updated: the round is cancelled, whoever iterates gets :class:`WeightsChanged`."""
        if self.summary is None:
            self._fail(WeightsChanged("weights were updated during a round: it was cancelled, nothing of it counts"))

    def cancel(self) -> None:
        """Abort what runs; the round will not have happened."""
        if self.summary is None:
            self._do(self.admitter.cancel())

    async def wait(self) -> None:
        """Until the engine has nothing of this round any more."""
        await self._over.wait()

    async def __aiter__(self) -> AsyncIterator[Group | Judge | Summary]:
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Summary):
                    return
        finally:
            self.cancel()

    # -- inside ----------------------------------------------------------------------------------------

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
                    self._judging.add(tuple(group.key))
                    self._events.put_nowait(action)
                case Return(group):
                    for sample in group.kept():
                        if len(sample.output.spans) > 1:
                            # Joined pieces may have cut a character in two.
                            sample.output.text = self._backend.text(sample.output.token_ids)
                    self._events.put_nowait(group)
                case RoundOver(summary):
                    self.summary = summary
                    self._events.put_nowait(self._error or summary)
                    self._over.set()
                    asyncio.get_running_loop().call_soon(self._let_go)
        if self.summary is None and self._slice is None and (self._queue or self.admitter.more):
            self._slice = asyncio.get_running_loop().call_soon(self._next_slice)

    def _next_slice(self) -> None:
        """Start and abort what is queued, a slice of it, then let others have the event loop."""
        self._slice = None
        if self.summary is not None:
            return
        if not self._queue and self.admitter.more:
            self._do(self.admitter.go_on())
        unstarted = []
        for _ in range(min(SLICE, len(self._queue))):
            match self._queue.popleft():
                case Launch(sample, prompt, prefix):
                    if sample in self._stopping:
                        unstarted.append(sample)
                    else:
                        self._tasks[sample] = asyncio.ensure_future(self._sample(sample, prompt, prefix))
                case Abort(sample):
                    if sample in self._tasks:
                        self._backend.abort(self._rid(sample))
                        self._again = self._again or asyncio.ensure_future(self._abort_again())
        for sample in unstarted:  # the engine never had it
            self._stopping.discard(sample)
            self._do(self.admitter.stopped(sample, Output()))
        self._do([])

    def _let_go(self) -> None:
        """Drop the returned groups, a few at a time: to free tens of thousands of samples takes a while."""
        del self._taken[-SLICE:]
        if self._taken:
            asyncio.get_running_loop().call_soon(self._let_go)

    async def _sample(self, sample: SampleId, prompt: Any, prefix: Output | None) -> None:
        output = Output()
        try:
            params = budget(self._params, sample, prefix)
            if params.get("max_new_tokens", 1) < 1:  # interrupted in the very step that would have ended it
                output = Output(finish_reason="length")
            else:
                output = await self._backend.generate(self._rid(sample), extended(prompt, prefix), params)
        except Exception as error:  # whatever it is, this round cannot be, and no prompt may be lost
            self._fail(error)
        if self._backend.updates() != self._updates:
            self.weights_changed()
            output = Output()  # of more than one version, nobody knows which token is whose
        del self._tasks[sample]
        self._stopping.discard(sample)
        output.spans = [Span(self.version, len(output.token_ids))] if output.token_ids else []
        tell = self.admitter.finished if output.finish_reason else self.admitter.stopped
        self._do(tell(sample, output))

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._do(self.admitter.cancel())

    async def _abort_again(self) -> None:
        seconds = ABORT_AGAIN_SECONDS
        while not self._over.is_set():
            try:
                await asyncio.wait_for(self._over.wait(), seconds)
            except TimeoutError:
                seconds = min(2 * seconds, 32 * ABORT_AGAIN_SECONDS)
                self._queue.extend(Abort(sample) for sample in self._stopping)
                self._do([])

    def _rid(self, sample: SampleId) -> str:
        return self.name + "-".join(map(str, sample))


def budget(params: dict[str, Any], sample: SampleId, prefix: Output | None) -> dict[str, Any]:
    """Sampling parameters of one sample: of the limits only what its prefix has left, of the seed one of its own."""
    params = dict(params)
    if prefix is not None:
        for name, least in (("max_new_tokens", None), ("min_new_tokens", 0)):
            if params.get(name) is not None:
                left = params[name] - prefix.tokens
                params[name] = left if least is None else max(left, least)
        # What policies would else take for a new response to another prompt.
        params["custom_params"] = {**(params.get("custom_params") or {}), GENERATED_PARAM: prefix.tokens}
    if params.get("sampling_seed") is not None:
        params["sampling_seed"] += sample.number
    return params


def extended(prompt: dict[str, Any], prefix: Output | None) -> dict[str, Any]:
    """The prompt and what was generated after it."""
    if prefix is None:
        return prompt
    return {"input_ids": [*prompt["input_ids"], *prefix.token_ids]}
