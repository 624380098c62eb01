"""An engine that is played, for rounds: a token a step."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from sglang_pat.messages import BeginRound
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.rules import Rules

STEP = 0.002
"""Seconds of a step."""


class Played:
    """A token a step; ``length``: of the response to a prompt of so many tokens, whatever came before."""

    def __init__(self, length=lambda prompt: prompt[0]) -> None:
        self.length = length
        self.running: dict[str, asyncio.Event] = {}
        self.calls: list[tuple[list[int], dict]] = []
        self.weights = 0
        self.deaf = 0
        self.aborts = 0
        self.told: list[BeginRound | str] = []

    async def begin_round(self, begun) -> None:
        self.told.append(begun)

    async def end_round(self, name) -> None:
        self.told.append(name)

    def updates(self) -> int:
        return self.weights

    async def generate(self, rid, prompt, params) -> Output:
        ids = prompt["input_ids"]
        self.calls.append((ids, params))
        if ids[0] < 0:
            raise ValueError("refused")
        stop = self.running[rid] = asyncio.Event()
        made: list[int] = []
        had = ids.count(7777)
        try:
            while had + len(made) < self.length(ids) and len(made) < params["max_new_tokens"]:
                try:
                    await asyncio.wait_for(stop.wait(), STEP)
                    return Output(token_ids=made, logprobs=[-1.0] * len(made))
                except TimeoutError:
                    made.append(7777)
            reason = "stop" if had + len(made) == self.length(ids) else "length"
            return Output(token_ids=made, logprobs=[-1.0] * len(made), finish_reason=reason)
        finally:
            del self.running[rid]

    def text(self, token_ids) -> str:
        return f"{len(token_ids)} tokens"

    def abort(self, rid) -> None:
        self.aborts += 1
        if self.deaf:
            self.deaf -= 1
        elif rid in self.running:
            self.running[rid].set()


def admitter(mode="strict", lengths=(3, 3, 3, 40, 3, 40), end=True, **rules) -> Admitter:
    given = {"num_prompts": 2, "num_responses": 2, "eta_prompts": 1.5} | rules
    made = Admitter(Rules(mode=mode, **given))
    made.feed([((0, i), {"input_ids": [length, i]}) for i, length in enumerate(lengths)], end_of=0 if end else None)
    return made


async def all_of(round_: RolloutRound) -> list:
    async with aclosing(aiter(round_)) as events:
        return [event async for event in events]
