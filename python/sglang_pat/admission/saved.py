"""The admitter's state in a file: written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from sglang_pat.admission.admitter import Admitter
from sglang_pat.admission.rules import Rules
from sglang_pat.admission.state import State

VERSION = 2


class Header(msgspec.Struct):
    """What files of all versions have."""

    version: int


class Saved(msgspec.Struct, kw_only=True):
    version: int
    rules: Rules
    state: State


def dumps(admitter: Admitter) -> bytes:
    """JSON of all that the admitter knows, a round under way included."""
    return msgspec.json.encode(Saved(version=VERSION, rules=admitter.rules, state=admitter.state))


def loads(data: bytes, rules: Rules | None = None, source: str = "saved admitter") -> Admitter:
    """``rules``: in place of the saved ones; the mode must be the same.

    A round under way is still under way: for the process that drives it.  Another one needs :func:`restore`.

    Raises:
        ValueError: one line: not such a file, of another version, or of another mode.
    """
    try:
        version = msgspec.json.decode(data, type=Header).version
        if version != VERSION:
            raise ValueError(f"{source}: version {version}, this is version {VERSION}; finish its epoch there")
        saved = msgspec.json.decode(data, type=Saved)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: not the state of an admitter ({error})") from None
    if rules is not None and rules.mode != saved.rules.mode:
        raise ValueError(f"mode is {rules.mode!r}, {source} is of mode {saved.rules.mode!r}; give another one")
    began = any(group.samples for group in saved.state.waiting)
    if rules is not None and rules.mode == "partial" and began and rules.num_responses != saved.rules.num_responses:
        was = saved.rules.num_responses
        raise ValueError(f"num_responses is {rules.num_responses}, {source} has groups of {was} half done; finish them")
    return Admitter(rules or saved.rules, saved.state)


def save(admitter: Admitter, path: Path) -> None:
    """Atomic: after a crash the file is what it was or what it was to be."""
    write(dumps(admitter), path)


def write(data: bytes, path: Path) -> None:
    """As :func:`save`, of what :func:`dumps` gave."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def restore(path: Path, rules: Rules | None = None) -> Admitter:
    """Of another process: a round that was under way is given up, no engine has it any more.

    Raises:
        ValueError: as :func:`loads`, or the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    admitter = loads(data, rules, str(path))
    admitter.engine_lost()
    return admitter
