"""The requests of a sample (:class:`Requests`): what the engine is given, once or in pieces; and what a round needs of
an engine (:class:`Backend`)."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from sglang_pat.messages import GENERATED_PARAM, ROUND_PARAM, BeginRound
from sglang_pat.rollout.records import Output, SampleId, Span
from sglang_pat.rollout.turns import EnvironmentCalls, make_turn

CUT = "\ufffd"
"""What a part of a character is decoded to."""

IN_VAIN = 16
"""Number of times that a sample may be aborted at the same length: an engine that aborts whatever it is asked for has
no bound."""


LIVES = 4
"""Number of engines that may die while they have one request: it may be what they die of."""
FIRST_LIVES = 2
"""Number of those that may die before they give its first token: most that kills does so at once."""

WHOLE_ONLY = (
    "stop", "stop_regex", "regex", "json_schema", "ebnf", "structural_tag", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip
"""Parameters that look back at the whole response, which after an interruption the engine takes for prompt."""


def find_whole_only(params: Mapping[str, Any]) -> str | None:
    """The first of :data:`WHOLE_ONLY` that is given, and does anything; None: the response may come in pieces."""
    names = (name for name in WHOLE_ONLY if params.get(name))
    return next((name for name in names if (name, params[name]) != ("repetition_penalty", 1)), None)


class Backend(Protocol):
    """An engine, in this process or behind a connection.

    Attributes:
        tokenizer: decodes responses that came in pieces; None: they have no text.
    """

    tokenizer: Any

    async def begin_round(self, begun: BeginRound) -> None:
        """The engine is told of the round before any of its samples."""
        ...

    async def end_round(self, name: str) -> None:
        """Record that the engine has nothing of the round any more."""
        ...

    def count_updates(self) -> int:
        """Weight updates so far, as far as is known: counted from the answers that have come."""
        ...

    async def generate(self, rid: str, prompt: Any, params: dict[str, Any]) -> Output:
        """What was generated, without ``spans``; without ``finish_reason`` if it did not end by itself.

        Raises:
            Exception: the engine refuses the prompt, or is gone.
        """
        ...

    def abort(self, rid: str) -> None:
        """Stop a request; :meth:`generate` returns what there is."""

    def get_token_limit(self) -> int:
        """Tokens of a request at most, prompt and response; asked for samples of several turns only."""
        ...


def check_params(sampling_params: dict[str, Any], mode: str) -> dict[str, Any]:
    """Sampling parameters of every sample, as far as rounds care: the engine checks the rest.

    Raises:
        ValueError: one line that names the parameter.
    """
    params = {name: value for name, value in sampling_params.items() if value is not None}
    if params.get("n", 1) != 1:
        raise ValueError(f"sampling_params.n is {params['n']}, must be 1: num_responses says how many")
    for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0), ("sampling_seed", None)):
        value = params.get(name, None if name == "max_new_tokens" else 0)
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            more = "" if least is None else f", at least {least}"
            raise ValueError(f"sampling_params.{name} is {value!r}, must be a whole number{more}")
    if mode == "partial" and (name := find_whole_only(params)):
        raise ValueError(f"sampling_params.{name}: not in partial, where responses come in pieces; leave it out")
    return params


def make_output(answer: dict[str, Any], params: dict[str, Any], stop_tokens: Iterable[int]) -> Output:
    """What SGLang answered to a request, for :meth:`Backend.generate`; also what it had sent of one that was cut off.

    An abort may come in the step that makes the last token; SGLang then says no more than that it was aborted.

    Args:
        params: parameters of the request; ``stop_tokens``: ids that end a response of this model.
    """
    meta, ids = answer["meta_info"], list(answer["output_ids"])
    reason: str = meta["finish_reason"]["type"] if meta["finish_reason"] else "abort"
    if reason == "abort":
        stops = () if params.get("ignore_eos") else {*stop_tokens, *(params.get("stop_token_ids") or ())}
        reason = "stop" if ids and ids[-1] in stops else ""
    logprobs: list[Any] = meta.get("output_token_logprobs") or []
    return Output(
        token_ids=ids,
        logprobs=[entry[0] for entry in logprobs],
        text=answer.get("text") or "",
        finish_reason=reason,
        routed_experts=np.frombuffer(b64decode(meta.get("routed_experts") or ""), np.int32).astype(np.int16).tobytes(),
    )


class Requests:
    """The requests of a round's samples.

    Args:
        name: what the ids of all of them begin with.
        version, params, turns: see :class:`~.rounds.RolloutRound`.
    """

    def __init__(
        self, backend: Backend, name: str, version: int, params: dict[str, Any], turns: EnvironmentCalls | None
    ) -> None:
        self._backend, self._name, self._version, self._params, self._turns = backend, name, version, params, turns
        self._cut: Counter[tuple[int, ...]] = Counter()
        """Number of times that a sample ended unfinished with so many tokens."""

    def make_rid(self, sample: SampleId) -> str:
        return self._name + "-".join(map(str, sample))

    def decode(self, outputs: Iterable[Output]) -> None:
        """Decode a response anew that came in pieces: where they were joined a character may be cut in two, and given
        tokens are none."""
        for output in outputs:
            if len(output.spans) > 1 or CUT in output.text:
                output.text = self._decode_tokens(output.token_ids)

    def _decode_tokens(self, token_ids: list[int]) -> str:
        return decode_tokens(self._backend.tokenizer, token_ids)

    async def generate_segment(self, sample: SampleId, prompt: Any, so_far: Output | None) -> Output:
        """What comes after ``so_far``: tokens of the model, or of the environment.

        Raises:
            RuntimeError: the engine aborts it again and again.
            Exception: as the engine and the environment do.
        """
        now = asyncio.get_running_loop().time
        begun = now()
        if self._turns is not None and so_far is not None and so_far.asked:
            answer = await self._turns.answer(make_turn(sample, prompt, so_far, self._decode_tokens))
            answer.seconds = now() - begun
            full = answer.spans and self._set_limits(sample, prompt, so_far.concatenate(answer))["max_new_tokens"] < 1
            return Output(finish_reason="length") if full else answer
        params = self._set_limits(sample, prompt, so_far)
        if params.get("max_new_tokens", 1) < 1:  # interrupted in the very step that would have ended it
            return Output(finish_reason="length")
        piece = await self._backend.generate(self.make_rid(sample), extend_prompt(prompt, so_far), params)
        piece.seconds = now() - begun
        piece.spans = [Span(self._version, len(piece.token_ids))] if piece.token_ids else []
        if not piece.finish_reason:
            self._check_progress(sample, piece.tokens + (so_far.tokens if so_far else 0))
        if self._turns is not None and piece.finish_reason == "stop":
            piece.finish_reason, piece.asked = "", True
        return piece

    def _check_progress(self, sample: SampleId, tokens: int) -> None:
        """Count the abort of a sample.  Raises RuntimeError: as often as that it was not this round."""
        at = (*sample.key, sample.number, tokens)
        self._cut[at] += 1
        if self._cut[at] >= IN_VAIN:
            raise RuntimeError(
                f"response {sample.number} to prompt {list(sample.key)} was aborted {IN_VAIN} times after {tokens} "
                "tokens, not by its round; see the engine's log, and who else aborts requests"
            )

    def _set_limits(self, sample: SampleId, prompt: Any, so_far: Output | None) -> dict[str, Any]:
        """Sampling parameters with what the response and, after given tokens, the engine have room for."""
        params = limit_params(self._params, sample, so_far)
        if self._turns is not None and so_far is not None:
            room = self._backend.get_token_limit() - len(prompt["input_ids"]) - len(so_far.token_ids)
            params["max_new_tokens"] = min(params["max_new_tokens"], room)
        return params


def limit_params(params: dict[str, Any], sample: SampleId, prefix: Output | None) -> dict[str, Any]:
    """Sampling parameters of one sample: its limits are what its prefix leaves, its seed is one of its own."""
    params = dict(params) if prefix is None else leave_room(params, prefix.tokens)
    if params.get("sampling_seed") is not None:
        params["sampling_seed"] += sample.number
    return params


def leave_room(params: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Sampling parameters of what comes after ``tokens`` more tokens of a response."""
    params = dict(params)
    for name, least in (("max_new_tokens", None), ("min_new_tokens", 0)):
        if params.get(name) is not None:
            left = params[name] - tokens
            params[name] = left if least is None else max(left, least)
    # What policies would else take for a new response to another prompt.
    custom: dict[str, Any] = params.get("custom_params") or {}
    params["custom_params"] = {**custom, GENERATED_PARAM: custom.get(GENERATED_PARAM, 0) + tokens}
    return params


def name_round(params: dict[str, Any], name: str) -> dict[str, Any]:
    """Sampling parameters of a request that says which round it is of, so that it renews this round's lease."""
    return params | {"custom_params": {**(params.get("custom_params") or {}), ROUND_PARAM: name}}


def decode_tokens(tokenizer: Any, token_ids: list[int]) -> str:
    """Text of a response that came in pieces; empty without a tokenizer."""
    return tokenizer.decode(token_ids, skip_special_tokens=True) if tokenizer is not None else ""


def extend_prompt(prompt: dict[str, Any], prefix: Output | None) -> dict[str, Any]:
    """The prompt and what was generated after it."""
    if prefix is None:
        return prompt
    return {**prompt, "input_ids": [*prompt["input_ids"], *prefix.token_ids]}
