"""Rounds for a program that has an engine in its process: ``Engine.rollout`` and ``Engine.async_rollout``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from sglang_pat.messages import EndRound
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.callbacks import Callbacks, MorePrompts, Verdicts, always_of_use, none_left
from sglang_pat.rollout.records import Group, Summary, Waiting
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.turns import ENVIRONMENT_SECONDS, Environment, Turns
from sglang_pat.server.intake import Intake
from sglang_pat.server.loop import EngineLoop
from sglang_pat.server.rollout_backend import ManagerBackend, announced


class RolloutCalls:
    """A part of ``Engine``."""

    tokenizer_manager: Any
    loop: Any

    async def async_rollout(
        self,
        admitter: Admitter,
        sampling_params: dict[str, Any],
        version: int,
        judge: Verdicts = always_of_use,
        more: MorePrompts = none_left,
        environment: Environment | None = None,
        environment_seconds: float = ENVIRONMENT_SECONDS,
    ) -> AsyncGenerator[Group | Summary, None]:
        """One round: its groups as they are completed, then its summary.

        Args:
            admitter: decides, and keeps what waits for another round; its prompts are ``{"input_ids": [...]}``.
            sampling_params: SGLang's, of every sample; ``max_new_tokens`` counts for a response, over all rounds and
                turns.
            version: of the weights, as the training job counts them; every token returned carries it (``partial``: or
                an earlier one, not older than ``max_staleness``).
            judge: whether a complete group is of use; with ``filter_groups``.  Called as soon as the group is complete,
                in a thread of its own (:class:`~sglang_pat.rollout.callbacks.Callbacks`).
            more: so many prompts, if the round could start some that were not fed: ``[((epoch, index), prompt), …]``.
                Fewer mean that there are no others for this round.  Called as ``judge`` is.
            environment: a coroutine function that answers the model when it has ended a turn
                (:mod:`~sglang_pat.rollout.turns`); without it that is the end of the sample.
            environment_seconds: longest that it may take for an answer.

        Left before its summary, the round has not happened: its prompts are where they were.

        Raises:
            ValueError: too few prompts, or bad parameters; nothing was started.
            WeightsChanged: weights were updated meanwhile; the round was cancelled.
        """
        params = Intake(self.tokenizer_manager).params(sampling_params, admitter.rules.mode)
        turns = Turns(environment, environment_seconds) if environment is not None else None
        backend = ManagerBackend(self.tokenizer_manager)
        told = False
        with Callbacks(judge, more) as callbacks:
            round_ = RolloutRound(admitter, backend, version, params, callbacks, turns)
            self.tokenizer_manager.pat_rollouts.watch(round_)
            self.tokenizer_manager.pat_round(announced(round_))
            try:
                async with aclosing(aiter(round_)) as events:
                    async for event in events:
                        told = isinstance(event, Summary)
                        if not isinstance(event, Waiting):
                            yield event
            finally:
                round_.cancel()
                await round_.wait()
                self.tokenizer_manager.pat_round(EndRound(name=round_.name))
                (round_.confirm if told else round_.take_back)()

    def rollout(self, *args: Any, **kwargs: Any) -> Iterator[Group | Summary]:
        """:meth:`async_rollout` for those without an event loop: the engine's runs in a thread until the round is over.

        So the round goes on while an event is trained on.  Other methods of the engine work meanwhile, other rollouts
        too, each with an admitter of its own.  Between two events leave the admitter alone: the round changes it.

        Raises RuntimeError: the engine was made inside an event loop, which this would hold up.
        """
        if not isinstance(self.loop, EngineLoop):
            raise RuntimeError("this engine was made inside an event loop; use async_rollout there")
        if self.tokenizer_manager.event_loop is None:
            self.status()  # the first call says who handles signals, which it can in the main thread only
        yield from self.loop.iterate(self.async_rollout(*args, **kwargs))
