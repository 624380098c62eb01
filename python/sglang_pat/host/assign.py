"""The one way in which we write attributes of SGLang's objects."""

from __future__ import annotations

from typing import Any


def assign(target: Any, **values: Any) -> None:
    """Set attributes of ``target`` that are there already.

    In another version of SGLang an attribute may have moved: a write to its old name would succeed and reach nobody.

    Raises:
        AttributeError: ``target`` has no such attribute; nothing is written.
    """
    for name in values:
        if not hasattr(target, name):
            raise AttributeError(
                f"SGLang's {type(target).__name__} has no attribute {name}, which sglang_pat writes: "
                "this version of SGLang keeps it elsewhere"
            )
    for name, value in values.items():
        setattr(target, name, value)
