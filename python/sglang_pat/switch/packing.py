"""Long lists of numbers as arrays, to travel: pickling a list takes a step for each of its elements.

Logprobs are such lists: of floats, of token ids, and of lists of them, with None where there is nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, cast

CODES = {float: "d", int: "q"}
"""Types of numbers that an array gives back as they were, and its type code for them."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A list.

    Attributes:
        numbers: its numbers, or those of its lists one after the other.
        holes: where None stands in it, ascending.
        lengths: of its lists; None if it has numbers itself.
    """

    numbers: array[Any]
    holes: list[int]
    lengths: array[int] | None = None


def pack(value: Any) -> Any:
    """A list that can be packed as :class:`Packed`; anything else as it is.

    It can if it consists of numbers of one type, or of lists of them, and None.
    """
    if type(value) is not list:
        return value
    given = cast("list[Any]", value)
    if not given:
        return given
    holes = [place for place, one in enumerate(given) if one is None]
    full = [one for one in given if one is not None] if holes else given
    if set(map(type, full)) == {list}:
        numbers, lengths = _array([number for one in full for number in one]), array("q", map(len, full))
    else:
        numbers, lengths = _array(full), None
    return given if numbers is None else Packed(numbers, holes, lengths)


def _array(numbers: list[Any]) -> array[Any] | None:
    kinds = set(map(type, numbers))
    if len(kinds) != 1 or (code := CODES.get(kinds.pop())) is None:
        return None
    try:
        return array(code, numbers)
    except OverflowError:  # an int of more than 64 bits
        return None


def unpack(value: Any) -> Any:
    """What :func:`pack` was given: equal to the bit, and of the same types."""
    if not isinstance(value, Packed):
        return value
    found: list[Any] = value.numbers.tolist()
    if value.lengths is not None:
        flat, found, end = found, [], 0
        for length in value.lengths:
            found.append(flat[end : end + length])
            end += length
    for place in value.holes:
        found.insert(place, None)
    return found
