"""Checks of fields of a request that only this version has: there are none."""

from __future__ import annotations

from typing import Any


def check_tokenized(req: Any) -> None:
    """Raise ValueError for what the ranks would not survive, or a switch not carry over."""


def take_params(params: dict[str, Any]) -> dict[str, Any]:
    """Take from sampling parameters those that only this version has, and return those that SGLang needs."""
    return {}
