"""What commands have in common: bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sglang_pat import errors
from sglang_pat.predict.profile import ProfileError


class UsageError(ValueError):
    """Something the user can change; the message is one line: what was given, what is allowed."""


class Parser(argparse.ArgumentParser):
    """Tells a bad command line in one line, without the usage above it."""

    def __init__(self, *, allow_abbrev: bool = False, **kwargs) -> None:
        super().__init__(allow_abbrev=allow_abbrev, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def format_short_line(error: BaseException) -> str:
    """An error in one line of at most 400 characters; see :func:`sglang_pat.errors.format_one_line`."""
    return errors.format_one_line(error)[:400]


def run(name: str, command: Callable[[list[str] | None], int], argv: list[str] | None = None) -> int:
    """Exit code of ``command(argv)``: 2 and one line for bad input, 130 when interrupted."""
    try:
        return command(argv)
    except (UsageError, ProfileError) as error:
        print(f"{name}: error: {format_short_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def check_output_folder(path: Path) -> Path:
    """``path`` as a folder, made if it is not there.  Raises UsageError: something is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror or error}; give another place") from None
    return path
