"""Silence while SGLang is imported: it warns of optional packages and devices that are not there.

Below ``--log-level debug``; what comes after the imports is SGLang's ordinary log.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LOUD_ENV = "SGLANG_PAT_LOUD_IMPORTS"
"""Set for children when the user wants to see everything."""


def hear(argv: Sequence[str]) -> None:
    """Take from the command line whether the noise is wanted."""
    words = [word for arg in argv for word in arg.split("=", 1)]
    if any(pair == ("--log-level", "debug") for pair in zip(words, words[1:], strict=False)):
        os.environ[LOUD_ENV] = "1"


def is_wanted() -> bool:
    return LOUD_ENV in os.environ


@contextmanager
def quiet_imports() -> Iterator[None]:
    """No warnings, and no log below errors, inside the block; afterwards only those of missing models stay away."""
    if is_wanted():
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        # It tries all its models on the first look-up, which may come later.
        logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)


@contextmanager
def quiet_children() -> Iterator[None]:
    """Interpreters started inside the block show no warnings of their imports."""
    if is_wanted() or sys.warnoptions or "PYTHONWARNINGS" in os.environ:
        yield
        return
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        yield
    finally:
        del os.environ["PYTHONWARNINGS"]
