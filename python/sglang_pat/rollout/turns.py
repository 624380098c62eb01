"""Samples of several turns: the model speaks, the environment answers (:data:`Environment`: a tool, a game, a simulated
user), and so on.

    generate → the model ends its turn → environment → given tokens → generate → … → None: the sample is finished

A turn is one request to the engine.  Between two the engine has nothing of the sample; to the admitter it is alive.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec

from sglang_pat.dropped import Dropped
from sglang_pat.rollout.records import Output, SampleId, Span

ENVIRONMENT_SECONDS = 60.0
"""Longest that an environment may take for an answer, unless another limit is given."""

MAX_SECONDS = 86_400
"""Largest limit of the environment's seconds."""

FAILED, LATE = "environment_error", "environment_timeout"
"""Finish reasons of a sample whose environment raised an exception, or did not answer in time."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that the model has ended.

    Attributes:
        number: number of the turn, from 0.
        prompt: the prompt, as it was fed.
        token_ids: all that came after the prompt so far, given tokens included.
        said: tokens that the model generated in this turn; ``text``: these without special tokens.
    """

    sample: SampleId
    number: int
    prompt: Any
    token_ids: list[int]
    said: list[int]
    text: str


Environment = Callable[[Turn], Awaitable[Sequence[int] | None]]
"""Token ids to append to the conversation, or None: it is over.

It runs in the event loop: what blocks or computes belongs into ``asyncio.to_thread``.  It may be asked the same again:
an answer that had not come when a sample was interrupted is asked for when the sample goes on.
"""


class EnvironmentCalls:
    """Asks an environment for the samples of a round.

    Args:
        seconds: longest that it may take for an answer.
    """

    def __init__(self, environment: Environment, seconds: float = ENVIRONMENT_SECONDS) -> None:
        if not 0 < seconds <= MAX_SECONDS:
            raise ValueError(f"environment_seconds is {seconds}, must be more than 0 and at most {MAX_SECONDS}")
        self._environment = environment
        self._seconds = seconds
        self._stops: dict[SampleId, asyncio.Future[None]] = {}
        self._failures = Dropped(False)

    async def answer(self, turn: Turn) -> Output:
        """What follows a turn: given tokens; nothing but a finish reason; or nothing, still ``asked``, as it was
        stopped.

        Raises:
            TypeError, ValueError: the answer is none; the environment is wrong, and so would be all samples.
        """
        reply = self._environment(turn)
        if not inspect.isawaitable(reply):
            raise TypeError(f"the environment gave {type(reply).__name__}, must be a coroutine function (async def)")
        call = asyncio.ensure_future(reply)
        stop = self._stops[turn.sample] = asyncio.get_running_loop().create_future()
        await asyncio.wait({call, stop}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        del self._stops[turn.sample]
        if not call.done():
            # Not waited for: it may not listen.
            call.cancel()
            call.add_done_callback(lambda call: call.cancelled() or call.exception())
            return Output(asked=True) if stop.done() else Output(finish_reason=LATE)
        error = asyncio.CancelledError("cancelled") if call.cancelled() else call.exception()
        if error is not None:
            self._failures.note("Turn", error)
            return Output(finish_reason=FAILED)
        return make_given_output(call.result())

    def stop(self, sample: SampleId) -> bool:
        """Wait for no answer any more; whether one was waited for."""
        stop = self._stops.get(sample)
        if stop is not None and not stop.done():
            stop.set_result(None)
        return stop is not None


def make_turn(sample: SampleId, prompt: Any, output: Output, text: Callable[[list[int]], str]) -> Turn:
    """The turn that ``output``, all after the prompt, ends with.  ``text``: of token ids."""
    count = 0
    for span in reversed(output.spans):
        if span.version is None:
            break
        count += span.tokens
    ids = output.token_ids
    number = sum(span.version is None for span in output.spans)
    last = ids[len(ids) - count :]
    return Turn(sample=sample, number=number, prompt=prompt, token_ids=ids, said=last, text=text(last))


def make_given_output(answer: object) -> Output:
    """An environment's answer, whatever it is, as part of a response.  Raises as :meth:`EnvironmentCalls.answer`."""
    if answer is None:
        return Output(finish_reason="stop")
    answer_ids = list(cast(Sequence[object], answer)) if isinstance(answer, Sequence) else []
    ids = [token for token in answer_ids if isinstance(token, int)]
    if not ids or len(ids) < len(answer_ids):
        shown = str(cast(object, answer))[:80]
        raise ValueError(f"the environment answered {shown!r}, must be token ids, at least one, or None")
    return Output(token_ids=ids, logprobs=[0.0] * len(ids), spans=[Span(None, len(ids))])
