"""What comes in with a round, checked and made into what the engine takes.

Everything here raises ValueError with one line that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.admission.admitter import Admitter
from sglang_pat.admission.rules import Rules
from sglang_pat.admission.turns import ENVIRONMENT_SECONDS, MAX_SECONDS
from sglang_pat.sglang.sampling import Sampling, checked
from sglang_pat.sglang.server.jobs import check_job

MAX_BODY_BYTES = 64 << 20
"""Of ``POST /pat/rollout``."""

MAX_ROUND_SAMPLES = 32_768
"""Samples that a round may start: the server's event loop does something for each of them."""

MAX_PROMPTS = 65_536
"""Prompts that a job may have waiting, those of the call included."""

Number = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""Whole, and the same in every JSON reader."""

NOTHING = msgspec.Raw(b"null")
"""A field that was not given."""


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """``key``: (epoch, index); one of ``text`` and ``input_ids``, a list of ints as JSON that is read later: reading
    those of a whole round takes long, and can be done a prompt at a time."""

    key: tuple[Number, Number]
    text: str | None = None
    input_ids: msgspec.Raw = NOTHING


class RolloutBody(Rules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /pat/rollout``: the rules, and

    Attributes:
        prompts: new ones, besides those that wait from earlier rounds.
        sampling_params: SGLang's, of every sample.
        version: of the weights, as the training job counts them; None: as the last round's, one more if
            weights were updated since.
        end_of_epoch: no more prompts of this epoch come.
        after: number of the last round that counts (-1: none): the job goes on as it was at its end.
        job: whose prompts wait; rounds of different jobs have nothing to do with each other.
        turns: samples go on after the model's turn: a ``turn`` event waits for an :class:`Answer`.
        environment_seconds: longest that it waits.
        planner: retractions of earlier rounds of a kind decide on the lowest tp of the next (RollPacker section 4.2).
    """

    prompts: list[Prompt] = []
    sampling_params: dict[str, Any] = {}
    version: Number | None = None
    end_of_epoch: Number | None = None
    after: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] | None = None
    job: str = "default"
    turns: bool = False
    environment_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = ENVIRONMENT_SECONDS
    planner: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_job(self.job)
        samples = self.started_prompts * self.started_responses
        if samples > MAX_ROUND_SAMPLES:
            raise ValueError(
                f"num_prompts {self.num_prompts} and num_responses {self.num_responses} start {samples} samples, "
                f"at most {MAX_ROUND_SAMPLES} are allowed; make rounds smaller"
            )

    @property
    def rules(self) -> Rules:
        return Rules(**{name: getattr(self, name) for name in Rules.__struct_fields__})


class Verdict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /pat/rollout/verdict``."""

    key: tuple[Number, Number]
    keep: bool
    reward: float | None = None
    job: str = "default"


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /pat/rollout/turn``: what the environment answers to a turn; without tokens: it is over."""

    sample: tuple[Number, Number, Number, Number]
    text: str | None = None
    input_ids: msgspec.Raw = NOTHING
    job: str = "default"


class MorePrompts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /pat/rollout/prompts``: for the round that is under way.

    Attributes:
        prompts, end_of_epoch, job: as in the round's call.
        no_more: there are no others for this round: it ends with what it has.
    """

    prompts: list[Prompt] = []
    end_of_epoch: Number | None = None
    no_more: bool = False
    job: str = "default"


def parse(data: bytes) -> RolloutBody:
    """Raises ValueError: one line that names the field."""
    return _decoded(data, RolloutBody)


def parse_verdict(data: bytes) -> Verdict:
    """Raises ValueError: one line that names the field."""
    return _decoded(data, Verdict)


def parse_answer(data: bytes) -> Answer:
    """Raises ValueError: one line that names the field."""
    return _decoded(data, Answer)


def parse_more(data: bytes) -> MorePrompts:
    """Raises ValueError: one line that names the field."""
    return _decoded(data, MorePrompts)


def _decoded(data: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None


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
        params = {name: value for name, value in checked(given).items() if value is not None}
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

    def fits(self, admitter: Admitter, new_prompts: int, new_tokens: int) -> None:
        """Prompts that wait from earlier calls must leave room for so many more, and for so many tokens."""
        groups = (*admitter.state.waiting, *admitter.state.fresh)
        if len(groups) + new_prompts > MAX_PROMPTS:
            raise ValueError(
                f"prompts: {new_prompts}, and {len(groups)} wait from earlier calls; at most {MAX_PROMPTS} together"
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
            given: list[int] | None = _decoded(prompt.input_ids, list[int] | None)
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
