"""The entrance, between clients and ranks: what a request must be before any rank sees it.

SGLang checks some of it, in the server or on the ranks; what it does not, ends a rank, and with it the engine.
Both checks run in the server's process and raise ValueError, which clients see as 400, with one line that names the
field, what was given and what is allowed.
"""

from __future__ import annotations

from array import array
from typing import Any, cast

import numpy as np
from fastapi import Request
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.fixes.sampling import INT64, checked, checked_all

MAX_SAMPLES = 65_536
"""Samples that one request may ask for: prompts times ``n``."""

RID_PREFIX = "pat-"
"""What the ids of the engine's own requests begin with."""

MAX_RID = 512
"""Characters of a request's id."""


def admit(obj: GenerateReqInput | EmbeddingReqInput, path: str | None) -> None:
    """Check ``obj`` before SGLang takes it apart, and give its sampling parameters their types.

    Args:
        path: of the HTTP request it came with; None if it comes from this process.
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
    given = obj.sampling_params
    if isinstance(given, list):
        if not given:
            raise ValueError("sampling_params is an empty list; give one object for each prompt, or a single one")
        obj.sampling_params = checked_all(given)
        n = obj.sampling_params[0].get("n") or 1
    elif given is not None:
        obj.sampling_params = checked(given)
        n = obj.sampling_params.get("n") or 1
    else:
        n = 1
    every = obj.sampling_params if isinstance(given, list) else [obj.sampling_params or {}]
    for params in cast("list[dict[str, Any]]", every):
        if "n" in params:
            params["n"] = params["n"] or 1
    prompts = obj.text if obj.text is not None else obj.input_ids
    single = isinstance(prompts, str) or (isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int))
    batch = 1 if single or prompts is None else len(prompts)
    if not batch:
        raise ValueError("there is no prompt; give text or input_ids")
    if batch * n > MAX_SAMPLES:
        raise ValueError(f"{batch} prompts, n is {n}: {batch * n} samples, at most {MAX_SAMPLES} are allowed")


def check_text(text: Any) -> None:
    """Of several prompts some would be on their way when SGLang's tokenizer stumbles over another one."""
    for i, one in enumerate(text if isinstance(text, list) else [] if text is None else [text]):
        where = f"text[{i}]" if isinstance(text, list) else "text"
        if not isinstance(one, str):
            raise ValueError(f"{where} is {str(one)[:40]!r}, must be a string")
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: character {error.start} is half of a surrogate pair; send it whole") from None


def route(request: Request) -> str:
    """Path of the route that ``request`` came to: without ``--fastapi-root-path``, which the server puts before it."""
    return request.scope["path"].removeprefix(request.scope.get("root_path", ""))


def check_rid(rid: Any, health: bool = False) -> None:
    """Ids that the engine keeps for itself, and ids that are none."""
    if rid is None:
        return
    if not isinstance(rid, str) or not 1 <= len(rid) <= MAX_RID:
        raise ValueError(f"rid is {str(rid)[:40]!r}, must be a string of 1 to {MAX_RID} characters")
    if not rid.isprintable():
        raise ValueError(f"rid is {rid[:40]!r}, must be printable")
    if not health and (HEALTH_CHECK_RID_PREFIX in rid or rid.startswith(RID_PREFIX)):
        raise ValueError(f"rid is {rid[:40]!r}: names with {HEALTH_CHECK_RID_PREFIX} and {RID_PREFIX} are the engine's")


class Entrance:
    """Checks what goes to the ranks against one engine.

    Args:
        manager: the TokenizerManager, for its model, tokenizer and arguments.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def admit(self, obj: GenerateReqInput | EmbeddingReqInput, path: str | None) -> None:
        """:func:`admit`, and labels that no metric of this engine has are left out."""
        admit(obj, path)
        if obj.custom_labels is not None:
            known = self._manager.server_args.tokenizer_metrics_allowed_custom_labels or ()
            obj.custom_labels = {name: value for name, value in obj.custom_labels.items() if name in known} or None

    def check(self, req: TokenizedGenerateReqInput) -> None:
        """Raises ValueError for what the ranks would not survive."""
        vocab = self._manager.model_config.vocab_size
        check_tokens("input_ids", req.input_ids, vocab)
        self._params(req.sampling_params, vocab)
        if req.token_ids_logprob is not None:
            check_tokens("token_ids_logprob", req.token_ids_logprob, vocab)
        check_whole("top_logprobs_num", req.top_logprobs_num, 0, vocab)
        check_whole("logprob_start_len", req.logprob_start_len, -1, INT64)
        check_whole("priority", req.priority, -INT64, INT64, optional=True)
        for name in ("rid", "extra_key", "lora_id", "routing_key"):
            if not isinstance(value := getattr(req, name), str | None):
                raise ValueError(f"{name} is of type {type(value).__name__}, must be a string")
        if not isinstance(req.positional_embed_overrides, PositionalEmbeds | None):
            raise ValueError("positional_embed_overrides: must be PositionalEmbeds; leave it out")
        if req.session_params is not None and not isinstance(req.session_params.id, str | None):
            raise ValueError(f"session_params.id is {req.session_params.id!r}, must be a string")
        if req.return_routed_experts or req.return_indexer_topk:
            raise ValueError("return_routed_experts and return_indexer_topk: the model has neither; leave them out")
        if req.multi_item_delimiter_indices is not None:
            check_tokens("multi_item_delimiter_indices", req.multi_item_delimiter_indices, len(req.input_ids))
        if req.custom_logit_processor:
            try:
                CustomLogitProcessor.from_str(req.custom_logit_processor)
            except Exception as error:
                raise ValueError(f"custom_logit_processor: cannot be loaded ({error})") from None

    def _params(self, params: SamplingParams, vocab: int) -> None:
        tokenizer = self._manager.tokenizer
        # Others never come, and SGLang uses them as indices.
        params.stop_token_ids = {token for token in params.stop_token_ids or () if 0 <= token < vocab} or None
        if tokenizer is None and (params.stop_strs or params.stop_regex_strs or params.min_new_tokens):
            raise ValueError(
                "stop, stop_regex and min_new_tokens need a tokenizer, and the engine runs with --skip-tokenizer-init; "
                "use stop_token_ids and ignore_eos"
            )
        if params.min_new_tokens and not isinstance(eos := tokenizer.eos_token_id, int):
            raise ValueError(f"min_new_tokens: the tokenizer has no token that ends a response (it is {eos}); use 0")


def check_tokens(name: str, ids: Any, end: int) -> None:
    """``ids``: a list of at least one whole number from 0 up to ``end``, which is excluded."""
    try:
        found = np.frombuffer(array("q", ids), dtype=np.int64)
    except (TypeError, OverflowError):
        raise ValueError(f"{name}: must be a list of whole numbers between 0 and {end - 1}") from None
    if not len(found):
        raise ValueError(f"{name}: is empty; give at least one token")
    if not 0 <= (lowest := found.min()) <= (highest := found.max()) < end:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: {wrong} is not between 0 and {end - 1}")


def check_whole(name: str, value: Any, least: int, most: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, must be a whole number between {least} and {most}")
