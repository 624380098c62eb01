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
