"""Files gone wrong: of a good one parts are deleted, retyped, scaled, doubled, reordered, nested; bytes are cut off."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

ODD = [
    None, True, False, "", "x", "\n", "1", "$a_{", [], {}, [0], [[]], {"a": 1}, 0, -1, 1, 2, 3, 4, 7, 8, 64, 65536,
    0.0, 0.5, -0.5, 1e-320, 1e-9, 1e-4, 3.0, 3600.0, 1e12, 1e308, math.nan, math.inf, -math.inf, 1 << 22, 1 << 39,
    1 << 40, 1 << 63, 1 << 70, 10**400,
]  # fmt: skip
"""What a value may have become."""

Change = Callable[[Callable, Any, Any], None]

FACTORS = [-1, 0, 1e-6, 0.01, 0.5, 2, 3, 100, 1e6]


@st.composite
def wrong_json(draw, good: Any, most: int = 3) -> bytes:
    """``good`` as JSON after one to ``most`` mutations; once in a while without its end, or with another byte in it."""
    value, changes = copy.deepcopy(good), draw(st.sampled_from([GENTLE, ALL]))
    for _ in range(draw(st.integers(1, most))):
        value = _mutated(draw, value, changes)
    return _bytes_changed(draw, json.dumps(value).encode())


@st.composite
def wrong_lines(draw, good: list[Any]) -> bytes:
    """The same of a file with a value a line."""
    lines = [json.dumps(line).encode() for line in good]
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(lines) - 1))
        what = draw(st.sampled_from(["mutate", "mutate", "mutate", "mutate", "delete", "double", "swap"]))
        if what == "mutate":
            value = _mutated(draw, json.loads(lines[place]), draw(st.sampled_from([GENTLE, ALL])))
            lines[place] = json.dumps(value).encode()
        elif what == "delete" and len(lines) > 1:
            del lines[place]
        elif what == "double":
            lines.insert(place, lines[place])
        elif what == "swap":
            lines[0], lines[place] = lines[place], lines[0]
    return _bytes_changed(draw, b"\n".join(lines) + b"\n")


def _bytes_changed(draw, data: bytes) -> bytes:
    """Mostly as it is: what is not JSON is found by the parser, whatever else is wrong with it."""
    what = draw(st.integers(0, 19))
    if what == 0:
        return data[: draw(st.integers(0, len(data)))]
    if what == 1:
        place = draw(st.integers(0, len(data) - 1))
        return data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
    if what == 2:
        depth = draw(st.sampled_from([2, 100, 100_000]))
        return b"[" * depth + data + b"]" * depth
    return data


def _mutated(draw, value: Any, changes: list[Change]) -> Any:
    """``value`` with one place changed in one of these ways; it is changed itself."""
    if not isinstance(value, dict | list) or not value:
        return _anything(draw)
    holder, key = value, None
    while True:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        key = draw(st.sampled_from(keys))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 4)) == 0:
            break
        holder = inner
    draw(st.sampled_from(changes))(draw, holder, key)
    return value


def _anything(draw) -> Any:
    return copy.deepcopy(draw(st.sampled_from(ODD)))


def _odd(draw, holder, key) -> None:
    holder[key] = _anything(draw)


def _little(draw, holder, key) -> None:
    """Another number of the same kind, or one thing less in a list."""
    number = holder[key]
    if isinstance(number, bool):
        holder[key] = not number
    elif isinstance(number, int):
        holder[key] = draw(st.sampled_from([number + 1, 2 * number, number // 2, max(number - 1, 0), 17 * number]))
    elif isinstance(number, float):
        holder[key] = number * draw(st.sampled_from([0.01, 0.5, 1.1, 3.0, 100.0]))
    elif isinstance(holder, list):
        del holder[key]


def _scale(draw, holder, key) -> None:
    number, factor = holder[key], draw(st.sampled_from(FACTORS))
    if isinstance(number, bool):
        holder[key] = not number
    elif isinstance(number, int) and abs(number) < 1 << 64:
        holder[key] = int(number * factor)
    elif isinstance(number, float):
        holder[key] = number * factor
    else:
        holder[key] = _anything(draw)


def _delete(draw, holder, key) -> None:
    del holder[key]


def _double(draw, holder, key) -> None:
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[draw(st.sampled_from(list(holder)))] = copy.deepcopy(holder[key])


def _reorder(draw, holder, key) -> None:
    if isinstance(holder[key], list):
        holder[key].reverse()
    elif isinstance(holder, list):
        holder.reverse()
    else:
        holder[key] = _anything(draw)


def _nest(draw, holder, key) -> None:
    holder[key] = [holder[key]] if draw(st.booleans()) else {"x": holder[key]}


GENTLE: list[Change] = [_little]
"""What often leaves a file that is right."""
ALL: list[Change] = [_little, _odd, _odd, _scale, _scale, _delete, _double, _reorder, _nest]
