"""What comes in with a round (``bodies.py``), checked against the engine and made into what it takes.

Everything here raises ValueError with one line that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.fixes.request_validation import Sampling, check_sampling_params
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.server.bodies import NOTHING, Answer, Prompt, decoded
from sglang_pat.server.jobs import held

MAX_PROMPTS = 65_536
"""Prompts that a job may have waiting, those of the call included."""

MAX_PROMPT_TOKENS = 1 << 25
"""Of the prompts of all jobs that wait or are in a round: each takes 8 to 40 bytes."""

WHOLE_ONLY = (
    "stop", "stop_regex", "regex", "json_schema", "ebnf", "structural_tag", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip
"""Parameters that look back at the whole response, which after an interruption the engine takes for prompt."""


class Intake:
    """Checks against one engine."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def params(self, given: dict[str, Any], mode: str) -> dict[str, Any]:
        """Sampling parameters of every sample."""
        where = "sampling_params"
        params = {name: value for name, value in check_sampling_params(given).items() if value is not None}
        typed = Sampling(**params)
        if typed.n != 1:
            raise ValueError(f"{where}.n is {typed.n}, must be 1: num_responses says how many")
        if (typed.max_new_tokens or 0) < 1:
            raise ValueError(f"{where}.max_new_tokens is {typed.max_new_tokens}, must be at least 1")
        params["max_new_tokens"] = typed.max_new_tokens
        tokens = [*(typed.stop_token_ids or ()), *map(_token, typed.logit_bias or ())]
        most = self._manager.model_config.vocab_size - 1
        if wrong := [token for token in tokens if not 0 <= token <= most]:
            raise ValueError(f"{where}: token {wrong[0]}, must be between 0 and {most}")
        for name in WHOLE_ONLY if mode == "partial" else ():
            if getattr(typed, name) != getattr(Sampling(), name):
                raise ValueError(f"{where}.{name}: not in partial, where responses come in pieces; leave it out")
        try:
            made = SamplingParams(**params)
            made.normalize(self._manager.tokenizer)
            made.verify(self._manager.model_config.vocab_size)
        except Exception as error:
            raise ValueError(f"{where}: {error}") from None
        return params

    async def prompts(self, prompts: Sequence[Prompt], new_tokens: int) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        """(key, prompt as token ids) of each; one in each turn of the event loop, since a text takes a millisecond."""
        # Not in a thread: SGLang's tokenizer is for one thread at a time, and the event loop uses it, too.
        found: list[tuple[tuple[int, int], dict[str, Any]]] = []
        for i, prompt in enumerate(prompts):
            found.append((prompt.key, {"input_ids": self._ids(prompt, f"prompts[{i}]", new_tokens)}))
            await asyncio.sleep(0)
        return found

    def fits(self, admitter: Admitter, prompts: list[tuple[Any, dict[str, Any]]], new_tokens: int, others: int) -> None:
        """What waits from earlier calls must leave room for ``prompts``, and for ``new_tokens`` after each of its own.

        ``others``: tokens of the prompts of all other jobs.
        """
        groups = (*admitter.state.waiting, *admitter.state.fresh)
        if len(groups) + len(prompts) > MAX_PROMPTS:
            raise ValueError(
                f"prompts: {len(prompts)}, and {len(groups)} wait from earlier calls; at most {MAX_PROMPTS} together"
            )
        given, before = sum(len(prompt["input_ids"]) for _, prompt in prompts), held(admitter.state) + others
        if given + before > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"prompts: {given} tokens, and {before} are there from earlier calls in all jobs; at most "
                f"{MAX_PROMPT_TOKENS} together; give fewer, or drop a job (DELETE /pat/rollout/JOB)"
            )
        for group in groups:
            length = len(group.prompt["input_ids"])
            if length + new_tokens > self.room:
                raise ValueError(
                    f"sampling_params.max_new_tokens is {new_tokens}, prompt {list(group.key)} of an earlier call has "
                    f"{length} tokens and there is room for {self.room}; lower it"
                )

    @property
    def room(self) -> int:
        """Tokens of a request at most, prompt and response."""
        return min(self._manager.context_len, self._manager.max_req_input_len or self._manager.context_len)

    def answer(self, given: Answer) -> list[int] | None:
        """Token ids to append to the conversation; None: it is over."""
        over = given.text is None and given.input_ids == NOTHING
        return None if over else self._ids(given, "turn", 0, special=False)

    def _ids(self, prompt: Prompt | Answer, where: str, new_tokens: int, special: bool = True) -> list[int]:
        """``special``: text gets what the tokenizer puts at the start."""
        try:
            given: list[int] | None = decoded(prompt.input_ids, list[int] | None)
        except ValueError as error:
            raise ValueError(f"{where}.input_ids: {error}") from None
        if (prompt.text is None) == (given is None):
            raise ValueError(f"{where}: give one of text and input_ids")
        if given is not None:
            ids, where = given, f"{where}.input_ids"
        elif self._manager.tokenizer is None:
            raise ValueError(f"{where}.text: there is no tokenizer (--skip-tokenizer-init); give input_ids")
        else:
            encode, where = self._manager.tokenizer.encode, f"{where}.text"
            ids = encode(prompt.text, add_special_tokens=special) if prompt.text else []
        if not ids:
            raise ValueError(f"{where}: is empty")
        most = self._manager.model_config.vocab_size - 1
        if not 0 <= min(ids) <= max(ids) <= most:
            raise ValueError(f"{where}: tokens {min(ids)} to {max(ids)}, must be between 0 and {most}")
        if len(ids) + new_tokens > self.room:
            total = f"{len(ids)} tokens and max_new_tokens {new_tokens}"
            raise ValueError(f"{where}: {total}, there is room for {self.room}; shorten one of them")
        return ids


def _token(text: str | int) -> int:
    return int(text) if str(text).isascii() and str(text).isdigit() else -1
