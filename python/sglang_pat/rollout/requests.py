"""The requests of a sample: what the engine is given, once or in pieces."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from sglang_pat.messages import GENERATED_PARAM
from sglang_pat.rollout.backend import Backend
from sglang_pat.rollout.records import Group, Output, SampleId, Span
from sglang_pat.rollout.turns import Turns, turn_of

RID_PREFIX = "pat-"
"""What the ids of a round's requests begin with; no client may use it."""

CUT = "\ufffd"
"""What a part of a character is decoded to."""

IN_VAIN = 16
"""So often may a sample be aborted at the same length: an engine that aborts whatever it is asked for has no bound."""


class Requests:
    """The requests of a round's samples.

    Args:
        name: what the ids of all of them begin with.
        version, params, turns: of the round, see :class:`~.rounds.RolloutRound`.
    """

    def __init__(self, backend: Backend, name: str, version: int, params: dict[str, Any], turns: Turns | None) -> None:
        self._backend, self._name, self._version, self._params, self._turns = backend, name, version, params, turns
        self._cut: Counter[tuple[int, ...]] = Counter()
        """How often a sample ended unfinished with so many tokens."""

    def rid(self, sample: SampleId) -> str:
        return self._name + "-".join(map(str, sample))

    def decode(self, group: Group) -> None:
        """Anew what came in pieces: where they were joined a character may be cut in two, and given tokens are none."""
        for sample in group.kept():
            output = sample.output
            if len(output.spans) > 1 or CUT in output.text:
                output.text = self._backend.text(output.token_ids)

    async def next_piece(self, sample: SampleId, prompt: Any, so_far: Output | None) -> Output:
        """What comes after ``so_far``: tokens of the model, or of the environment.

        Raises:
            RuntimeError: the engine aborts it again and again.
            Exception: as the engine and the environment do.
        """
        now = asyncio.get_running_loop().time
        begun = now()
        if self._turns is not None and so_far is not None and so_far.asked:
            answer = await self._turns.answer(turn_of(sample, prompt, so_far, self._backend.text))
            answer.seconds = now() - begun
            full = answer.spans and self._limits(sample, prompt, so_far.followed_by(answer))["max_new_tokens"] < 1
            return Output(finish_reason="length") if full else answer
        params = self._limits(sample, prompt, so_far)
        if params.get("max_new_tokens", 1) < 1:  # interrupted in the very step that would have ended it
            return Output(finish_reason="length")
        piece = await self._backend.generate(self.rid(sample), extended(prompt, so_far), params)
        piece.seconds = now() - begun
        piece.spans = [Span(self._version, len(piece.token_ids))] if piece.token_ids else []
        if not piece.finish_reason:
            self._check_progress(sample, piece.tokens + (so_far.tokens if so_far else 0))
        if self._turns is not None and piece.finish_reason == "stop":
            piece.finish_reason, piece.asked = "", True
        return piece

    def _check_progress(self, sample: SampleId, tokens: int) -> None:
        """Of one that was aborted.  Raises RuntimeError: as often as that it was not this round."""
        at = (*sample.key, sample.number, tokens)
        self._cut[at] += 1
        if self._cut[at] >= IN_VAIN:
            raise RuntimeError(
                f"response {sample.number} to prompt {list(sample.key)} was aborted {IN_VAIN} times after {tokens} "
                "tokens, not by its round; see the engine's log, and who else aborts requests"
            )

    def _limits(self, sample: SampleId, prompt: Any, so_far: Output | None) -> dict[str, Any]:
        """Sampling parameters with what the response and, after given tokens, the engine have room for."""
        params = budget(self._params, sample, so_far)
        if self._turns is not None and so_far is not None:
            room = self._backend.room() - len(prompt["input_ids"]) - len(so_far.token_ids)
            params["max_new_tokens"] = min(params["max_new_tokens"], room)
        return params


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
