"""SGLang's sampling parameters with their types and bounds.

SGLang takes them as they come, and some that are wrong end the process that meets them: a rank, or the coordinator.
Everything here raises ValueError with one line that names the field, what was given and what is allowed.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import msgspec

from sglang_pat.fixes import patterns
from sglang_pat.messages import GENERATED_PARAM

INT32 = 2**31 - 1
INT64 = 2**63 - 1

MAX_BIAS = 1e9
"""Largest ``logit_bias``, up or down; -infinity is taken for the lowest.  More would leave no token to choose from
where a grammar or ``min_new_tokens`` forbids the others."""

LEAST_REPETITION_PENALTY = 1e-6
"""Logits are divided by it: less would make them infinite."""

MAX_TEMPERATURE = 1e30
"""Of 32-bit floats, with room for what they are multiplied with."""

MAX_STOPS = 1024
"""Stop strings and patterns of a request: each is looked for after every token."""

MAX_TEXT = 1 << 20
"""Characters of a grammar."""

MAX_STOP_TEXT = patterns.LONGEST_TEXT // 2
"""Characters of the stop strings of a request together: SGLang compares every beginning of each with the response."""

MAX_DEPTH = 100
"""Nesting of ``custom_params`` and of brackets in a grammar: what walks them is recursive, and so is pickle."""

LIMIT_PARAM = "pat_limit"
"""In ``custom_params``: the longest response that policies are to reckon with, where ``max_new_tokens`` would give a
response's length away (benchmarks with lengths fixed in advance)."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=INT32)]


class Sampling(msgspec.Struct, forbid_unknown_fields=True):
    """The parameters of SGLang's ``SamplingParams``; None where that takes it for the default."""

    max_new_tokens: Whole | None = 128
    min_new_tokens: Whole | None = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=INT32)] | None = 1
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TEMPERATURE)] | None = 1.0
    top_p: float | None = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=INT32)] | None = -1
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=LEAST_REPETITION_PENALTY)] | None = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    custom_params: dict[str, Any] | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1, le=INT32)] | None = None
    logit_bias: dict[str | int, float] | None = None
    sampling_seed: Annotated[int, msgspec.Meta(ge=-INT64, le=INT64)] | None = None


_WHOLE = ("max_new_tokens", "min_new_tokens", "n", "top_k", "stream_interval", "sampling_seed")
_REAL = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_TEXTS = ("stop", "stop_regex", "regex", "json_schema", "ebnf", "structural_tag")
_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


def checked(given: Any) -> dict[str, Any]:
    """``given`` with every value in SGLang's own type: 16.0 and true are 16 and 1, as SGLang takes them.

    Raises:
        ValueError: for what SGLang does not take, or would die of.
    """
    if not isinstance(given, dict):
        raise ValueError(f"sampling_params is {_short(given)}, must be an object")
    plain = {name: _plain(name, value) for name, value in given.items()}
    try:
        typed = msgspec.convert(plain, Sampling)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {error}") from None
    params = {name: getattr(typed, name) for name in plain}
    _check_texts(params)
    _check_custom(params.get("custom_params"))
    if params.get("logit_bias"):
        params["logit_bias"] = {token: _bias(token, value) for token, value in params["logit_bias"].items()}
    return params


def checked_all(given: list[Any]) -> list[dict[str, Any]]:
    """:func:`checked`, of each sample of a request."""
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    left = patterns.MAX_OTHERS
    for one in given:
        params = checked(one)
        texts = params.get("stop_regex") or ()
        new = {texts} - seen if isinstance(texts, str) else set(texts) - seen
        seen |= new
        left -= sum(map(len, new))
        if left < 0:
            raise ValueError(
                f"sampling_params.stop_regex: more than {patterns.MAX_OTHERS} characters for all samples together; "
                "send several requests"
            )
        found.append(params)
    return found


def _plain(name: str, value: Any) -> Any:
    """``value`` as SGLang's arithmetic takes it."""
    if name in _WHOLE:
        if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
            value = int(value)
        if name == "max_new_tokens" and isinstance(value, int):
            value = min(value, INT32)  # SGLang lowers it to what there is room for
    elif name in _REAL and isinstance(value, bool):
        value = float(value)
    elif name in _FLAGS and isinstance(value, int):
        value = bool(value)
    elif name == "stop_token_ids" and isinstance(value, (list, tuple, set)):
        try:
            value = [int(token) for token in value if token is not None]
        except (TypeError, ValueError, OverflowError):
            raise ValueError("sampling_params.stop_token_ids: must be token ids") from None
    return value


def _bias(token: str | int, value: float) -> float:
    if math.isnan(value) or value > MAX_BIAS:
        raise ValueError(f"sampling_params.logit_bias: {value} for token {_short(token)}, must be at most {MAX_BIAS:g}")
    return max(value, -MAX_BIAS)


def _check_texts(params: dict[str, Any]) -> None:
    for name in _TEXTS:
        texts = params.get(name) or ()
        texts = [texts] if isinstance(texts, str) else texts
        if len(texts) > MAX_STOPS:
            raise ValueError(f"sampling_params.{name}: {len(texts)} of them, at most {MAX_STOPS} are allowed")
        most = MAX_STOP_TEXT if name == "stop" else MAX_TEXT
        if (given := sum(map(len, texts))) > most:
            raise ValueError(f"sampling_params.{name}: {given} characters, at most {most} are allowed")
        if name == "stop_regex":
            patterns.check(texts)
        for text in texts if name in _GRAMMARS else ():
            if (depth := _brackets(text)) > MAX_DEPTH:
                raise ValueError(f"sampling_params.{name}: brackets {depth} deep, at most {MAX_DEPTH} are allowed")


def _brackets(text: str) -> int:
    """How deep the brackets of ``text`` are nested at most, whatever they mean."""
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _check_custom(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            break
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list, tuple))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    else:
        raise ValueError(f"sampling_params.custom_params: nested more than {MAX_DEPTH} deep; flatten it")
    for name, least in ((LIMIT_PARAM, 1), (GENERATED_PARAM, 0)):
        given = value.get(name) if isinstance(value, dict) else None
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < least):
            raise ValueError(
                f"sampling_params.custom_params.{name} is {_short(given)}, must be a whole number from {least} on"
            )


def length_limit(params: Any) -> int | None:
    """The longest response that policies reckon with, from SGLang's ``SamplingParams``; a number of 32 bits.

    What came with the prompt of it counts.  None if neither the request nor SGLang has set one yet.
    """
    limit = _custom(params, LIMIT_PARAM)
    if limit is None and params.max_new_tokens is not None:
        limit = params.max_new_tokens + generated_before(params)
    return None if limit is None else max(0, min(int(limit), INT32))


def generated_before(params: Any) -> int:
    """Tokens of the response that came with the prompt, from SGLang's ``SamplingParams``; a number of 32 bits."""
    return max(0, min(_custom(params, GENERATED_PARAM) or 0, INT32))


def _custom(params: Any, name: str) -> int | None:
    """A whole number of ``custom_params``; None if there is none."""
    custom = params.custom_params
    value = custom.get(name) if isinstance(custom, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
