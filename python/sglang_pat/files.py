"""Files that others wrote: read up to a size, checked, refused in one line.  Ours: whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

MOST_BYTES = 16 << 20
"""Most bytes of a file that is read as a whole."""

SHOWN = 60
"""Most characters of a value in a message."""

Kind = TypeVar("Kind")

_WHERE = re.compile(r" - at `(key in )?\$?(.*)`\Z")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


class NotJson(ValueError):
    """Not JSON, or not all of it."""


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file.

    Raises:
        ValueError: it cannot be read, is empty or larger than :data:`MOST_BYTES`; the message does not name the file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB, the most that is read")
    if not data.strip():
        raise ValueError("empty")
    return data


def decode(data: bytes | str, kind: type[Kind]) -> Kind:
    """JSON as a value of ``kind``.

    Raises:
        NotJson: no JSON.
        ValueError: not of this type: which field, what is there, what is expected.
    """
    try:
        return convert(msgspec.json.decode(data), kind)
    except msgspec.DecodeError as error:
        raise NotJson(f"not JSON: {_simplify_message(str(error).removeprefix('JSON is malformed: '))}") from None
    except UnicodeDecodeError:
        raise NotJson("not JSON: not UTF-8") from None
    except RecursionError:
        raise NotJson("not JSON: nested too deeply") from None


def convert(value: Any, kind: type[Kind], dec_hook: Callable[[type, Any], Any] | None = None) -> Kind:
    """A value of plain JSON values as one of ``kind``; ``dec_hook``: as msgspec's.

    Raises:
        ValueError: as :func:`decode` for what is not of the type.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=dec_hook, str_keys=True)
    except msgspec.ValidationError as error:
        message = str(error)
    except OverflowError as error:
        raise ValueError(f"a number in it is too large: {error}") from None
    place = _WHERE.search(message)
    what = _simplify_message(message[: place.start()] if place else message)
    if place is None:
        raise ValueError(what)
    raise make_field_error(place.group(2).lstrip("."), _get_at_path(value, place.group(2)), what)


def make_field_error(field: str, value: Any, expected: str) -> ValueError:
    """The error of a field: what it is, and what was expected; of lists and objects only the latter."""
    if value is None or isinstance(value, bool | int | float | str):
        shown = msgspec.json.encode(value).decode() if not isinstance(value, int) else str(value).lower()
        shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"
        return ValueError(f"{field} is {shown}: {expected}")
    return ValueError(f"{field}: {expected}")


def _simplify_message(message: str) -> str:
    """What msgspec says, as part of a sentence."""
    message = " ".join(message.replace("`", "").split())
    return message[:1].lower() + message[1:]


def _get_at_path(value: Any, path: str) -> Any:
    """What is at a path such as ``.decode[3].batch``; an empty list if that cannot be told."""
    end = 0
    for step in _STEP.finditer(path):
        if step.start() != end:
            return []
        name, place = step.groups()
        try:
            value = value[name] if name is not None else value[int(place)]
        except (TypeError, KeyError, IndexError):
            return []
        end = step.end()
    return value if end == len(path) else []


def write(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
