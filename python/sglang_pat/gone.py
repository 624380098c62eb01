"""What earlier versions took and this one does not: refused in one line that says what there is instead."""

from __future__ import annotations

from collections.abc import Iterable

GONE = {
    "a round's tp": "the policy chooses the degree in which a round starts, from KV room and retractions",
}
"""What it was, as the message calls it, and what there is instead."""


def refuse_gone(whose: str, names: Iterable[str]) -> None:
    """Raise ``ValueError`` if one of the ``names`` that somebody gave for ``whose`` is gone."""
    for name in names:
        if (what := f"{whose} {name}") in GONE:
            raise ValueError(f"{what} is gone: {GONE[what]}")
