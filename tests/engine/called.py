"""``sglang_pat.launch_server``, whose processes write down what they call of ours, and what of it replaces SGLang's.

    CALLED=/tmp/called python -m tests.engine.called --model-path M --tp 1 --dp 2 --adaptive-tp ...

Each line of the file has a word, and a function by its file, first line and name.  The word is the package of a caller,
or one of :data:`KINDS`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import NamedTuple

from sglang_pat import launch_server
from sglang_pat.host import guard
from sglang_pat.testing.prefork import fork_stock

ENV = "CALLED"
KINDS = OVERRIDES, INNER, PUT = "+overrides", "+inner", "+put"
"""A method that overrides one of SGLang's; one that another class of ours overrides again; a function that a module or
a class of SGLang's has."""
FIRST_REQUEST = {"generate_request", "handle_generate_request"}
"""Functions of ours that are called once everything is in its place."""


class Function(NamedTuple):
    file: str
    line: int
    name: str


def read(file: Path) -> dict[Function, set[str]]:
    """The words of each function."""
    words: dict[Function, set[str]] = defaultdict(set)
    for word, path, line, name in map(str.split, file.read_text().splitlines()):
        words[Function(path, int(line), name)].add(word)
    return words


class Recorder:
    """The function for ``sys.settrace``: called with each call, and with nothing else.

    Forks go on writing.  Each line is written at once, since ranks are killed at the end.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._written: set[tuple[str, CodeType]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(guard.FOLDER):
            caller = frame.f_back.f_globals.get("__name__") if frame.f_back else None
            is_new = self._write((caller or "nobody").partition(".")[0], code)
            if is_new and code.co_name in FIRST_REQUEST:
                for kind, replacement in _list_replacements():
                    self._write(kind, replacement)

    def _write(self, word: str, code: CodeType) -> bool:
        """Returns whether it is new."""
        if (word, code) in self._written:
            return False
        self._written.add((word, code))
        path = code.co_filename.removeprefix(guard.FOLDER)
        with open(self._file, "a") as file:
            file.write(f"{word} {path} {code.co_firstlineno} {code.co_qualname}\n")
        return True


def _list_replacements() -> Iterator[tuple[str, CodeType]]:
    """What of ours replaces SGLang's in this process, with its kind."""
    overrides = list(guard.list_overrides())
    for override in overrides:
        again = (
            other.name == override.name and other.kind is not override.kind and issubclass(other.kind, override.kind)
            for other in overrides
        )
        kind = INNER if any(again) else OVERRIDES
        yield from ((kind, function.__code__) for function in override.functions)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "sglang" and module is not None:
            classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == name]
            for value in (value for owner in (module, *classes) for value in list(vars(owner).values())):
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if isinstance(function, FunctionType) and _replaces(function.__code__.co_filename):
                    yield PUT, function.__code__


def _replaces(file: str) -> bool:
    """Whether a function in ``file`` is one of ours; those for a CPU stand for libraries, not for SGLang."""
    return file.startswith(guard.FOLDER) and not file.startswith(f"{guard.FOLDER}cpu/")


if __name__ == "__main__":
    recorder = Recorder(os.environ[ENV])
    threading.settrace(recorder)
    sys.settrace(recorder)
    if "--adaptive-tp" not in sys.argv:
        fork_stock()
    launch_server.main()
