"""An engine that is played, for rounds: a token in each turn of the event loop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from sglang_pat.messages import BeginRound
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.rounds import RolloutRound
from sglang_pat.rollout.rules import Rules

SAID = 7
"""A token of the model."""

FOREVER = 1 << 40


class Played:
    """The first token of a prompt is the length of the response; negative: it is refused."""

    def __init__(self, room: int = 1000) -> None:
        self.running: dict[str, bool] = {}
        """False: to be stopped."""
        self.calls: list[tuple[list[int], dict]] = []
        self.weights = 0
        self.deaf = 0
        self.aborts = 0
        self.told: list[BeginRound | str] = []
        self._room = room

    async def begin_round(self, begun) -> None:
        self.told.append(begun)

    async def end_round(self, name) -> None:
        self.told.append(name)

    def count_updates(self) -> int:
        return self.weights

    def get_token_limit(self) -> int:
        return self._room

    @property
    def tokenizer(self) -> Any:
        return self

    def decode(self, token_ids, skip_special_tokens) -> str:
        return " ".join(map(str, token_ids))

    def left(self, ids: list[Any]) -> int:
        """Tokens until the model ends its turn."""
        return ids[0] - ids.count(SAID)

    async def generate(self, rid, prompt, params) -> Output:
        ids = prompt["input_ids"]
        self.calls.append((ids, params))
        left, made = self.left(ids), 0
        if left < 0:
            raise ValueError("refused")
        self.running[rid] = True
        try:
            while made < min(left, params.get("max_new_tokens", left)):
                await asyncio.sleep(0)
                if not self.running[rid]:
                    return self.output(made, "")
                made += 1
            return self.output(made, "stop" if made == left else "length")
        finally:
            del self.running[rid]

    def output(self, tokens: int, reason: str) -> Output:
        return Output(token_ids=[SAID] * tokens, logprobs=[-1.0] * tokens, finish_reason=reason)

    def abort(self, rid) -> None:
        self.aborts += 1
        if self.deaf:
            self.deaf -= 1
        elif rid in self.running:
            self.running[rid] = False


def admitter(*lengths: Any, mode: str = "strict", end: bool = True, **rules: Any) -> Admitter:
    """A prompt for each length; ``end``: of the epoch."""
    given = {"num_prompts": 2, "num_responses": 2, "eta_prompts": 1.5} | rules
    made = Admitter(Rules(mode=mode, **given))
    made.feed([((0, i), {"input_ids": [length]}) for i, length in enumerate(lengths)], end_of=0 if end else None)
    return made


async def list_events(round_: RolloutRound) -> list:
    async with aclosing(aiter(round_)) as events:
        return [event async for event in events]
