"""The one way in which we write attributes of SGLang's objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def assign(target: Any, **values: Any) -> None:
    """Set attributes of ``target`` that are there already.

    In another version of SGLang an attribute may have moved: a write to its old name would succeed and reach nobody.

    Raises:
        AttributeError: ``target`` has no such attribute; nothing is written.
    """
    for name in values:
        if not hasattr(target, name):
            kind = getattr(target, "__name__", type(target).__name__)  # of a class or a module its own
            raise AttributeError(
                f"SGLang's {kind} has no attribute {name}, which sglang_pat writes: "
                "this version of SGLang keeps it elsewhere"
            )
    for name, value in values.items():
        setattr(target, name, value)


@contextmanager
def assigned(target: Any, **values: Any) -> Iterator[None]:
    """Inside the block, attributes of ``target`` that are there already have other values.

    Raises:
        AttributeError: as :func:`assign`.
    """
    before = {name: getattr(target, name, None) for name in values}
    assign(target, **values)
    try:
        yield
    finally:
        assign(target, **before)
