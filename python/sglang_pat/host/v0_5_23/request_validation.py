"""Checks of fields of a request that only this version has."""

from __future__ import annotations

from typing import Any

NOT_YET = {
    "return_sampling_mask": "a switch does not carry masks over",
    "return_flat_raw_top_logprobs": "a switch does not carry them over",
    "kv_hints": "they are for the hierarchical cache",
    "token_indices_to_pool": "the model does not embed",
}
"""Reasons against fields, by name."""


def check_tokenized(req: Any) -> None:
    """Raise ValueError for what the ranks would not survive, or a switch not carry over."""
    for name, reason in NOT_YET.items():
        if getattr(req, name):
            raise ValueError(f"{name}: not with --adaptive-tp, {reason}; leave it out")
    for name in ("session_id", "cache_salt"):
        if not isinstance(value := getattr(req, name), str | None):
            raise ValueError(f"{name} is of type {type(value).__name__}, must be a string")


def take_params(params: dict[str, Any]) -> dict[str, Any]:
    """Take from sampling parameters those that only this version has, and return those that SGLang needs.

    Left are those that a client has set, and that are refused.
    """
    for name, unset in (("watermark", (None,)), ("beam_width", (None, 1))):  # its OpenAI routes name them always
        if params.get(name) in unset:
            params.pop(name, None)
    whole = params.pop("ebnf_full_assistant", None)  # set by SGLang's routes where a model calls functions
    return {"ebnf_full_assistant": bool(whole)} if whole is not None else {}
