"""Checks of a request before any rank sees it.

SGLang checks some of it, in the server or on the ranks.  A value that it does not check ends the process that meets it,
and with it the engine: a token outside the vocabulary, ``top_logprobs_num`` beyond it, NaN, numbers beyond 32 bits.
Everything here runs in the server and raises ValueError, which clients see as 400, with one line that names the field,
what was given and what is allowed.

Upstream: https://github.com/sgl-project/sglang/pull/31908 (token ids of the prompt),
https://github.com/sgl-project/sglang/pull/28088 (those of ``token_ids_logprob``),
https://github.com/sgl-project/sglang/issues/40076 (``top_logprobs_num``), and the rest in
``docs/upstream/unchecked_requests.md``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import Request
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_pat.host import adapter
from sglang_pat.host.fixes.stop_patterns import LONGEST_TEXT, MAX_OTHERS, check_patterns
from sglang_pat.messages import DRAFTS_PARAM, GENERATED_PARAM, LIMIT_PARAM, ROUND_PARAM, ClientName

INT32, INT64 = 2**31 - 1, 2**63 - 1

MAX_SAMPLES = 65_536
"""Most samples that one request may ask for: prompts times ``n``."""

RID_PREFIX = "pat-"
"""Beginning of the ids of the engine's own requests."""

MAX_RID = 512
"""Most characters of a request's id."""

MAX_BIAS = 1e9
"""Largest ``logit_bias``, up or down; -infinity is taken for the lowest.  More would leave no token to choose from
where a grammar or ``min_new_tokens`` forbids the others."""

LEAST_REPETITION_PENALTY = 1e-6
"""Least repetition penalty: logits are divided by it, and less would make them infinite."""

MAX_TEMPERATURE = 1e30
"""Largest temperature: a 32-bit float, with room for what it is multiplied with."""

MAX_STOPS = 1024
"""Most stop strings and patterns of a request: each is looked for after every token."""

MAX_TEXT = {"stop": LONGEST_TEXT // 2} | dict.fromkeys(
    ("stop_regex", "regex", "json_schema", "ebnf", "structural_tag"), 1 << 20
)
"""Most characters of each text, by field.  SGLang compares every beginning of each stop string with the response."""

MAX_DEPTH = 100
"""Deepest nesting of ``custom_params`` and of brackets in a grammar: what walks them is recursive, and so is pickle."""

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
    logit_bias: dict[str | int, Annotated[float, msgspec.Meta(le=MAX_BIAS)]] | None = None
    sampling_seed: Annotated[int, msgspec.Meta(ge=-INT64, le=INT64)] | None = None


def check_sampling_params(options: Any) -> dict[str, Any]:
    """``options`` with every value in SGLang's own type: 16.0 and true are 16 and 1, as SGLang takes them.

    Raises:
        ValueError: a value that SGLang does not take, or would die of.
    """
    if not isinstance(options, dict):
        raise ValueError(f"sampling_params is {_shorten(options)}, must be an object")
    plain = {name: int(value) if isinstance(value, bool) else value for name, value in options.items()}
    if isinstance(limit := plain.get("max_new_tokens"), int):
        plain["max_new_tokens"] = min(limit, INT32)  # SGLang lowers it to what there is room for
    if isinstance(ids := plain.get("stop_token_ids"), list | tuple | set):
        plain["stop_token_ids"] = [token for token in ids if token is not None]
    taken = adapter.tokenizer.take_params(plain)
    try:
        typed = msgspec.convert(plain, Sampling, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"sampling_params: {error}") from None
    params = {name: getattr(typed, name) for name in plain}
    for name, most in MAX_TEXT.items():
        _check_texts(name, params.get(name) or (), most)
    _check_custom_params(params.get("custom_params"))
    if params.get("logit_bias"):
        params["logit_bias"] = {token: max(value, -MAX_BIAS) for token, value in params["logit_bias"].items()}
    return params | taken


def _check_texts(name: str, texts: str | Sequence[str], most: int) -> None:
    texts = [texts] if isinstance(texts, str) else texts
    if len(texts) > MAX_STOPS:
        raise ValueError(f"sampling_params.{name}: {len(texts)} of them, at most {MAX_STOPS} are allowed")
    if (characters := sum(map(len, texts))) > most:
        raise ValueError(f"sampling_params.{name}: {characters} characters, at most {most} are allowed")
    if name == "stop_regex":
        check_patterns(texts)
    elif name != "stop":
        for text in texts:
            steps = (1 if bracket in "([{" else -1 for bracket in re.findall(r"[()\[\]{}]", text))
            if (deep := max(accumulate(steps, lambda depth, step: max(depth + step, 0)), default=0)) > MAX_DEPTH:
                raise ValueError(f"sampling_params.{name}: brackets {deep} deep, at most {MAX_DEPTH} are allowed")


def _check_custom_params(value: dict[str, Any] | None) -> None:
    if _measure_depth(value) > MAX_DEPTH:
        raise ValueError(f"sampling_params.custom_params: nested more than {MAX_DEPTH} deep; flatten it")
    for name, least in ((LIMIT_PARAM, 1), (GENERATED_PARAM, 0), (DRAFTS_PARAM, 0)):
        if (number := (value or {}).get(name)) is not None:
            check_whole(f"sampling_params.custom_params.{name}", number, least)
    if (round_name := (value or {}).get(ROUND_PARAM)) is not None:
        try:
            msgspec.convert(round_name, ClientName)
        except msgspec.ValidationError:
            raise ValueError(
                f"sampling_params.custom_params.{ROUND_PARAM} is {_shorten(round_name)}, must be the name of a round: "
                "1 to 64 letters, digits, _ or -"
            ) from None


def _measure_depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return 1 + max(map(_measure_depth, inner), default=-1)


def check_request(obj: GenerateReqInput | EmbeddingReqInput, path: str | None) -> None:
    """Check ``obj`` before SGLang takes it apart, and give its sampling parameters their types.

    Args:
        path: path of the HTTP request it came with; None if it comes from this process.
    """
    if isinstance(obj, EmbeddingReqInput):
        raise ValueError("the model generates text and does not embed; ask an engine started with --is-embedding")
    if path is not None:
        for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
            check_rid(rid, health=path.startswith("/health"))
        obj.http_worker_ipc = None  # an address that outputs would be sent to; ours are not from workers
        if obj.positional_embed_overrides is not None:
            raise ValueError("positional_embed_overrides: not over HTTP; leave it out")
    if obj.input_embeds is not None:
        raise ValueError("input_embeds: not with --adaptive-tp, which takes prompts along as tokens; use input_ids")
    check_text(obj.text)
    options = obj.sampling_params
    if options == []:
        raise ValueError("sampling_params is an empty list; give one object for each prompt, or a single one")
    if isinstance(options, list):
        check_patterns_together(options)
        every = obj.sampling_params = [check_sampling_params(one) for one in options]
    else:
        every = [check_sampling_params({} if options is None else options)]
        obj.sampling_params = None if options is None else every[0]
    for params in every:
        if "n" in params:
            params["n"] = params["n"] or 1
    n = every[0].get("n", 1)
    prompts = obj.text if obj.text is not None else obj.input_ids
    single = isinstance(prompts, str) or (isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int))
    batch = 1 if single or prompts is None else len(prompts)
    if not batch:
        raise ValueError("there is no prompt; give text or input_ids")
    if batch * n > MAX_SAMPLES:
        raise ValueError(f"{batch} prompts, n is {n}: {batch * n} samples, at most {MAX_SAMPLES} are allowed")


def check_patterns_together(every: Sequence[Any]) -> None:
    """Check the patterns of all samples of a request together: the server's event loop parses them."""
    patterns = [params.get("stop_regex") for params in every if isinstance(params, dict)]
    texts = {text for one in patterns for text in (one if isinstance(one, list) else [one]) if isinstance(text, str)}
    if sum(map(len, texts)) > MAX_OTHERS:
        raise ValueError(
            f"sampling_params.stop_regex: more than {MAX_OTHERS} characters for all samples together; "
            "send several requests"
        )


def check_text(text: Any) -> None:
    """Check the text of all prompts first: some would be on their way when SGLang's tokenizer fails on another one."""
    for i, one in enumerate(text if isinstance(text, list) else [] if text is None else [text]):
        where = f"text[{i}]" if isinstance(text, list) else "text"
        if not isinstance(one, str):
            raise ValueError(f"{where} is {_shorten(one)}, must be a string")
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: character {error.start} is half of a surrogate pair; send it whole") from None


def check_rid(rid: Any, health: bool = False) -> None:
    """Refuse an id that the engine keeps for itself, and one that is no text."""
    if rid is None:
        return
    if not isinstance(rid, str) or not 1 <= len(rid) <= MAX_RID:
        raise ValueError(f"rid is {_shorten(rid)}, must be a string of 1 to {MAX_RID} characters")
    if not rid.isprintable():
        raise ValueError(f"rid is {_shorten(rid)}, must be printable")
    if not health and (HEALTH_CHECK_RID_PREFIX in rid or rid.startswith(RID_PREFIX)):
        raise ValueError(f"rid is {_shorten(rid)}: {HEALTH_CHECK_RID_PREFIX} and {RID_PREFIX} are the engine's")


def drop_unknown_labels(obj: Any, args: Any) -> None:
    """Leave out the labels of ``obj`` that no metric of an engine with these arguments has."""
    if getattr(obj, "custom_labels", None) is not None:
        labels = args.tokenizer_metrics_allowed_custom_labels or ()
        obj.custom_labels = {name: value for name, value in obj.custom_labels.items() if name in labels} or None


def find_route(request: Request) -> str:
    """The path of the route that ``request`` came to, without ``--fastapi-root-path``."""
    return request.scope["path"].removeprefix(request.scope.get("root_path", ""))


def check_tokenized(req: TokenizedGenerateReqInput, vocab: int, tokenizer: Any, routed: bool = False) -> None:
    """Raise ValueError for what the ranks would not survive.  Stop tokens that cannot come are left out.

    ``routed``: whether the engine returns routed experts.
    """
    check_tokens("input_ids", req.input_ids, vocab)
    params = req.sampling_params
    # SGLang uses them as indices.
    params.stop_token_ids = {token for token in params.stop_token_ids or () if 0 <= token < vocab} or None
    if tokenizer is None and (params.stop_strs or params.stop_regex_strs or params.min_new_tokens):
        raise ValueError(
            "stop, stop_regex and min_new_tokens need a tokenizer, and the engine runs with --skip-tokenizer-init; "
            "use stop_token_ids and ignore_eos"
        )
    if params.min_new_tokens and not isinstance(eos := tokenizer.eos_token_id, int):
        raise ValueError(f"min_new_tokens: the tokenizer has no token that ends a response (it is {eos}); use 0")
    if req.token_ids_logprob is not None:
        check_tokens("token_ids_logprob", req.token_ids_logprob, vocab)
    check_whole("top_logprobs_num", req.top_logprobs_num, 0, vocab)
    check_whole("logprob_start_len", req.logprob_start_len, -1, INT64)
    if req.priority is not None:
        check_whole("priority", req.priority, -INT64, INT64)
    for name in ("rid", "extra_key", "lora_id", "routing_key"):
        if not isinstance(value := getattr(req, name), str | None):
            raise ValueError(f"{name} is of type {type(value).__name__}, must be a string")
    if not isinstance(req.positional_embed_overrides, PositionalEmbeds | None):
        raise ValueError("positional_embed_overrides: must be PositionalEmbeds; leave it out")
    if req.session_params is not None and not isinstance(req.session_params.id, str | None):
        raise ValueError(f"session_params.id is {req.session_params.id!r}, must be a string")
    if req.return_routed_experts and not routed:
        raise ValueError("return_routed_experts: not without --enable-return-routed-experts; leave it out")
    adapter.tokenizer.check_tokenized(req)
    check_whole("routed_experts_start_len", req.routed_experts_start_len, 0, len(req.input_ids))
    if req.return_indexer_topk:
        raise ValueError("return_indexer_topk: the model has no indexer; leave it out")
    if req.multi_item_delimiter_indices is not None:
        check_tokens("multi_item_delimiter_indices", req.multi_item_delimiter_indices, len(req.input_ids))
    if req.custom_logit_processor:
        try:
            CustomLogitProcessor.from_str(req.custom_logit_processor)
        except Exception as error:
            raise ValueError(f"custom_logit_processor: cannot be loaded ({error})") from None


def check_tokens(name: str, ids: Any, end: int) -> None:
    """Check that ``ids`` is a list of at least one whole number from 0 up to ``end``, which is excluded."""
    try:
        tokens = np.frombuffer(array("q", ids), dtype=np.int64)
    except (TypeError, OverflowError):
        raise ValueError(f"{name}: must be a list of whole numbers between 0 and {end - 1}") from None
    if not len(tokens):
        raise ValueError(f"{name}: is empty; give at least one token")
    if not 0 <= (lowest := tokens.min()) <= (highest := tokens.max()) < end:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: {wrong} is not between 0 and {end - 1}")


def check_whole(name: str, value: Any, least: int, most: float = float("inf")) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {_shorten(value)}, must be a whole number from {least} to {most}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
