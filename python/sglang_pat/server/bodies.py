"""The bodies of ``/pat/rollout`` and what belongs to it, read and checked as far as no engine is needed for that.

Everything here raises ValueError with one line that names the field, what was given and what is allowed.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.turns import ENVIRONMENT_SECONDS, MAX_SECONDS
from sglang_pat.server.jobs import check_job

MAX_BODY_BYTES = 64 << 20
"""Of ``POST /pat/rollout``."""

MAX_ROUND_SAMPLES = 32_768
"""Samples that a round may start: the server's event loop does something for each of them."""

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
    """

    prompts: list[Prompt] = []
    sampling_params: dict[str, Any] = {}
    version: Number | None = None
    end_of_epoch: Number | None = None
    after: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] | None = None
    job: str = "default"
    turns: bool = False
    environment_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = ENVIRONMENT_SECONDS

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
    """The body of ``POST /pat/rollout/verdict``; ``number``: of the round, as the ``judge`` event has it."""

    key: tuple[Number, Number]
    number: Number
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
        number: of the round, as the ``more`` event has it; None: whichever is under way.
    """

    prompts: list[Prompt] = []
    end_of_epoch: Number | None = None
    no_more: bool = False
    number: Number | None = None
    job: str = "default"

    def __post_init__(self) -> None:
        if self.no_more and self.number is None:
            raise ValueError("no_more ends one round, and number is missing: give that of the `more` event")


def parse(data: bytes) -> RolloutBody:
    """Raises ValueError: one line that names the field."""
    return decoded(data, RolloutBody)


def parse_verdict(data: bytes) -> Verdict:
    """Raises ValueError: one line that names the field."""
    return decoded(data, Verdict)


def parse_answer(data: bytes) -> Answer:
    """Raises ValueError: one line that names the field."""
    return decoded(data, Answer)


def parse_more(data: bytes) -> MorePrompts:
    """Raises ValueError: one line that names the field."""
    return decoded(data, MorePrompts)


def decoded(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Raises ValueError: one line that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
