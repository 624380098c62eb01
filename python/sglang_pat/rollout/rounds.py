"""A round on an engine: what the admitter wants is done, what the engine answers is told to it.

The same code wherever the admitter is: in the server (``server/rollout.py``), in the process of an ``Engine``,
or in a client of a server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.backend import Backend
from sglang_pat.rollout.callbacks import Callbacks
from sglang_pat.rollout.events import SLICE, Event, Events, let_go
from sglang_pat.rollout.records import (  # fmt: skip
    Abort,
    Action,
    Judge,
    Key,
    Launch,
    More,
    Output,
    Return,
    RoundOver,
    SampleId,
    Summary,
    Waiting,
)
from sglang_pat.rollout.requests import RID_PREFIX, Requests
from sglang_pat.rollout.turns import Turns

ABORT_AGAIN_SECONDS = 0.5
"""An abort that overtakes its request is dropped by SGLang; it is sent again until the request is out."""

PROMPTS_PATIENCE = 2
"""A round that has said so many times that it waits for prompts, and for nothing else, ends without them."""

_serial = itertools.count()


class WeightsChanged(RuntimeError):
    """Weights were updated while a round was under way: it was cancelled, its prompts are where they were."""


class RolloutRound:
    """One round; iterate over it to get its groups as they are completed, then its summary.

    ``Judge`` comes before a group is returned if groups are filtered: answer with :meth:`judge`.  ``More`` asks for
    prompts: answer with :meth:`feed` or :meth:`no_more`.  ``Waiting`` comes when nothing else has for a while.

    Left before its end (``aclose``), it is cancelled: what it had started is aborted in the background, see
    :meth:`wait`.  Who knows that nobody has read its end calls :meth:`take_back`, who knows of one :meth:`confirm`.
    """

    def __init__(
        self,
        admitter: Admitter,
        backend: Backend,
        version: int,
        params: dict[str, Any],
        callbacks: Callbacks | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Begin the round: to be called in the event loop.

        Args:
            version: of the weights, as the training job counts them.
            params: sampling parameters of all samples.
            callbacks: answer in place of whoever iterates: then no ``Judge`` and no ``More`` comes.
            turns: samples go on when the model has ended a turn; None: that ends them.  Without an environment a
                ``Turn`` comes: answer with :meth:`answer`.

        Raises ValueError or RuntimeError: see :meth:`Admitter.begin`; nothing was started.
        """
        self.admitter, self.version, self.params = admitter, version, params
        self.summary: Summary | None = None
        self.name = f"{RID_PREFIX}{next(_serial)}-"
        """What request ids of this round begin with."""
        self._backend = backend
        self._requests = Requests(backend, self.name, version, params, turns)
        self._events = Events(self.waiting)
        self._tasks: dict[SampleId, asyncio.Task[None]] = {}
        self._stopping: set[SampleId] = set()
        self._queue: deque[Launch | Abort] = deque()
        self._slice: asyncio.Handle | None = None
        self._callbacks, self._turns = callbacks, turns
        if turns is not None:
            turns.join(admitter.rules, self._events.put)
        self._fed: list[tuple[list[tuple[Sequence[int], Any]], int | None]] = []
        self._judging: set[Key] = set()
        self._late: set[Key] = set()
        self.before = admitter.snapshot()
        """The admitter's state before this round: what it goes back to if the round has not happened."""
        self.number = admitter.state.last + 1
        self._updates, self._begun = backend.updates(), asyncio.get_running_loop().time()
        self._error: Exception | None = None
        self._over = asyncio.Event()
        self._again: asyncio.Task[None] | None = None
        actions = admitter.begin(version, most=SLICE)
        over = [action.summary.kind for action in actions if isinstance(action, RoundOver)]
        begun = admitter.state.round
        self.kind = begun.kind if begun else over[0]
        self._taken = begun.taken if begun else []
        self._do(actions)

    def judge(self, key: Sequence[int], keep: bool, reward: float | None = None) -> bool:
        """The verdict on a group; False if it is late: the batch is complete without it, and it is generated again.

        Raises ValueError: none was asked for.
        """
        key = Key(*key)
        if key in self._late:
            return False
        if key not in self._judging:
            raise ValueError(f"key is {list(key)}, verdicts are awaited for {sorted(map(list, self._judging))[:8]}")
        self._judging.remove(key)
        self._do(self.admitter.judged(key, keep, reward))
        return True

    def answer(self, sample: Sequence[int], token_ids: Sequence[int] | None) -> None:
        """The environment's answer to a ``Turn`` of this round, see :meth:`Turns.give`."""
        if self._turns is None:
            raise ValueError(f"sample is {list(sample)}, samples of this round have one turn")
        self._turns.give(SampleId(*sample), token_ids)

    def feed(self, prompts: Iterable[tuple[Sequence[int], Any]], end_of: int | None = None) -> bool:
        """More prompts, whether they were asked for or not; False if the round is over: they are for the next one.

        Raises ValueError: a key that came before; none is taken.
        """
        if self.summary is not None:
            return False
        prompts = list(prompts)
        self._do(self.admitter.feed(prompts, end_of))
        self._fed.append((prompts, end_of))
        return True

    def no_more(self) -> None:
        """Nobody has the prompts that the round asked for: it ends with those that it has."""
        if self.summary is None:
            self._do(self.admitter.no_more())

    def take_back(self) -> None:
        """The round is over, and nobody has read it: it has not happened, its prompts are where they were.

        Those that came during the round stay, too: whoever gave them was told that they were taken.
        """
        assert self.summary is not None, "it is under way: cancel it"
        if not self.summary.cancelled:
            self.admitter.restore(self.before)
            for prompts, end_of in self._fed:
                self.admitter.feed(prompts, end_of)

    def confirm(self) -> None:
        """Its end has been read: it is not taken back any more."""
        let_go(self.before.waiting)

    def weights_changed(self) -> None:
        """Weights were updated: the round is cancelled, whoever iterates gets :class:`WeightsChanged`."""
        if self.summary is None:
            self.fail(WeightsChanged("weights were updated during a round: it was cancelled, nothing of it counts"))

    def cancel(self) -> None:
        """Abort what runs; the round will not have happened."""
        if self.summary is None:
            self._do(self.admitter.cancel())

    async def wait(self) -> None:
        """Until the engine has nothing of this round any more."""
        await self._over.wait()

    def waiting(self) -> Waiting:
        """What it waits for."""
        round_ = self.admitter.state.round
        asked = 0 if round_ is None or round_.dry else round_.asked
        return Waiting(running=len(self._tasks) + len(self._queue), judging=sorted(self._judging), prompts=asked)

    async def __aiter__(self) -> AsyncIterator[Event]:
        idle = 0
        watch = asyncio.ensure_future(self._events.watch())
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Waiting):
                    idle = idle + 1 if event.prompts and not (event.running or event.judging) else 0
                    if idle >= PROMPTS_PATIENCE:
                        self.no_more()
                if isinstance(event, Exception):
                    raise event
                needed = not isinstance(event, Judge) or event.group.key in self._judging
                if needed and (self._error is None or isinstance(event, Waiting)):
                    yield event
                if isinstance(event, Summary):
                    return
        finally:
            watch.cancel()
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
                    self._requests.decode(group)
                    self._judging.add(group.key)
                    self._ask(Judge(group.own()))
                case More():
                    self._ask(action)
                case Return(group):
                    self._requests.decode(group)
                    self._events.put(group.own())  # the end of a cancelled round changes ours
                case RoundOver(summary):
                    seconds = asyncio.get_running_loop().time() - self._begun
                    summary = self.summary = self.admitter.took(summary, seconds)
                    self._late, self._judging = self._judging, set()
                    self._events.put(self._error or summary)
                    self._over.set()
                    if self._callbacks is not None:
                        self._callbacks.stop()
                    asyncio.get_running_loop().call_soon(let_go, self._taken)
        if self.summary is None and self._slice is None and (self._queue or self.admitter.more):
            self._slice = asyncio.get_running_loop().call_soon(self._next_slice)

    def _next_slice(self) -> None:
        """Start and abort what is queued, a slice of it, then let others have the event loop."""
        self._slice = None
        if self.summary is not None:
            return
        if not self._queue and self.admitter.more:
            self._do(self.admitter.go_on())
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
                        self._backend.abort(self._requests.rid(sample))
                        self._again = self._again or asyncio.ensure_future(self._abort_again())
        for sample in unstarted:  # the engine never had it
            self._stopping.discard(sample)
            self._do(self.admitter.stopped(sample, Output()))
        self._do([])

    async def _sample(self, sample: SampleId, prompt: Any, prefix: Output | None) -> None:
        output = Output()
        try:
            goes_on = True
            while goes_on and sample not in self._stopping:
                so_far = prefix.followed_by(output) if prefix else output
                step = await self._requests.next_piece(
                    sample, prompt, so_far if so_far.token_ids or so_far.asked else None
                )
                if self._backend.updates() != self._updates:
                    self.weights_changed()
                    break  # it is of more than one version, nobody knows which token is whose
                output = output.followed_by(step)
                goes_on = not step.finish_reason and (step.asked or any(span.version is None for span in step.spans))
        except Exception as error:  # whatever it is, this round cannot be, and no prompt may be lost
            self.fail(error)
        del self._tasks[sample]
        self._stopping.discard(sample)
        tell = self.admitter.finished if output.finish_reason else self.admitter.stopped
        self._do(tell(sample, output))

    def _ask(self, event: Judge | More) -> None:
        if self._callbacks is not None:
            self._callbacks.answer(self, event)
        else:
            self._events.put(event)

    def fail(self, error: Exception) -> None:
        """Cancel the round; whoever iterates gets the first such error."""
        if self._error is None and self.summary is None:
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
