"""An engine and an environment that are played, for samples of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Output
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.turns import Turn, Turns

SAID, END, TOOL = 7, 9, 5
"""Tokens: of the model; the last of its turn; of the environment."""


class Played:
    """A token in each turn of the event loop; a prompt says how many tokens each of the model's turns has."""

    def __init__(self, room: int = 1000) -> None:
        self.running: dict[str, bool] = {}
        self.calls: list[tuple[list[int], dict]] = []
        self.weights = 0
        self._room = room

    async def begin_round(self, begun) -> None:
        """Nobody asks."""

    async def end_round(self, name) -> None:
        """Nobody asks."""

    def updates(self) -> int:
        return self.weights

    def room(self) -> int:
        return self._room

    def text(self, token_ids) -> str:
        return " ".join(map(str, token_ids))

    def abort(self, rid) -> None:
        if rid in self.running:
            self.running[rid] = False

    async def generate(self, rid, prompt, params) -> Output:
        ids = prompt["input_ids"]
        self.calls.append((ids, params))
        lengths, after = ids[0], ids[1:]
        turn = after.count(END)
        left = lengths[turn] - (len(after) - max((i + 1 for i, t in enumerate(after) if t in (END, TOOL)), default=0))
        made: list[int] = []
        self.running[rid] = True
        try:
            while len(made) < min(left, params["max_new_tokens"]):
                await asyncio.sleep(0)
                if not self.running[rid]:
                    return Output(token_ids=made, logprobs=[-1.0] * len(made))
                made.append(END if len(made) == left - 1 else SAID)
            reason = "stop" if made[-1] == END else "length"
            return Output(token_ids=made, logprobs=[-1.0] * len(made), finish_reason=reason)
        finally:
            del self.running[rid]


class Tools:
    """An environment: ``calls`` of them answer with three tokens, the next says that it is over.

    Attributes:
        open: an answer comes while it is set.
        asked: set while a call waits.
    """

    def __init__(self, calls: int = 1) -> None:
        self.calls = calls
        self.turns: list[Turn] = []
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, turn: Turn) -> list[int] | None:
        self.turns.append(turn)
        self.asked.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [TOOL] * 3 if turn.number < self.calls else None


def admitter(*lengths: list[int], mode: str = "strict", **rules) -> Admitter:
    """A prompt for each, which has the lengths of the model's turns for its first token."""
    given = {"num_prompts": len(lengths), "num_responses": 1, "eta_prompts": 1.0, "eta_responses": 1.0} | rules
    made = Admitter(Rules(mode=mode, **given))
    made.feed([((0, i), {"input_ids": [each]}) for i, each in enumerate(lengths)], end_of=0)
    return made


def begun(mine: Admitter, engine: Played, environment, version: int = 0, seconds: float = 60, **params) -> RolloutRound:
    turns = Turns(environment, seconds) if environment is not None else None
    return RolloutRound(mine, engine, version, {"max_new_tokens": 100} | params, turns=turns)


async def all_of(round_: RolloutRound) -> list:
    async with aclosing(aiter(round_)) as events:
        return [event async for event in events]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def only(events: list) -> Output:
    (group,) = [event for event in events if isinstance(event, Group)]
    return group.kept()[0].output
