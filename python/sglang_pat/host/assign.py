"""Writing attributes of SGLang's objects: one that is not there is not written, and the rank ends."""

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
            raise _make_error(target, name)
    for name, value in values.items():
        setattr(target, name, value)


def assign_many(target: Any, values: dict[str, Any], late: frozenset[str] = frozenset()) -> None:
    """Set plain attributes of ``target``, which all but ``late`` are there already; quick, for the state of a request.

    Raises:
        AttributeError: as :func:`assign`; also for a property.
    """
    if not hasattr(target, "__dict__"):  # it has slots
        return assign(target, **values)
    attributes = vars(target)
    for name in values.keys() - attributes.keys() - late:
        raise _make_error(target, name)
    attributes.update(values)


def _make_error(target: Any, name: str) -> AttributeError:
    kind = getattr(target, "__name__", type(target).__name__)  # of a class or a module its own
    return AttributeError(
        f"SGLang's {kind} has no attribute {name}, which sglang_pat writes: this version of SGLang keeps it elsewhere"
    )


class Overlaid:
    """An object of SGLang's whose attributes are those of ``inner``, but for ``values``."""

    def __init__(self, inner: Any, **values: Any) -> None:
        vars(self).update(values, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def assigned(target: Any, **values: Any) -> Iterator[None]:
    """Give attributes of ``target`` that are there already other values, for the length of the block.

    Raises:
        AttributeError: as :func:`assign`.
    """
    before = {name: getattr(target, name, None) for name in values}
    assign(target, **values)
    try:
        yield
    finally:
        assign(target, **before)
