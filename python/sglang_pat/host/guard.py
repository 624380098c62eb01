"""A check at every start: whatever of ours replaces a method of SGLang's still replaces one.

A method that SGLang no longer has under its name is never called, and nothing says so.  The files ``contract.txt`` have
the names of all that we override in any version.  So where a class of ours that is made of SGLang's has a method of
such a name, SGLang must have it, too.  ``tests/engine/test_overrides.py`` traces that SGLang also calls it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import FunctionType
from typing import Any

from sglang_pat.launch.contract import SGLangMismatch, get_installed_version, read_symbols
from sglang_pat.version import ADAPTERS

FOLDER = f"{Path(__file__).parents[1]}/"
"""Folder in which the files of all our functions lie."""


@dataclass(frozen=True)
class Override:
    """A method or property of ours that SGLang knows by this name.

    Attributes:
        kind: our class, which is made of SGLang's.
        functions: what it consists of: one function, or the two of a property.
        base: the nearest class of SGLang's that has the name, or reads it; None if SGLang has no such name any more.
    """

    kind: type
    name: str
    functions: tuple[FunctionType, ...]
    base: type | None

    def __str__(self) -> str:
        return f"{self.kind.__qualname__}.{self.name}"

    def find_problem(self) -> str | None:
        """Reason why SGLang cannot call it, in one line; None if it can."""
        if self.base is None:
            return f"{self}: SGLang has no method of this name any more"
        theirs = getattr(self.base, self.name, None)
        # How an object is made is for whoever makes it: most of ours are made by ourselves.
        if callable(theirs) and self.name != "__init__":
            if refused := _list_refused(getattr(self.kind, self.name), theirs):
                return f"{self}: SGLang's takes {', '.join(refused)}, ours does not"
        return None


def check_overrides() -> None:
    """Check all that is overridden in modules that this process has imported.

    Raises:
        SGLangMismatch: SGLang would not call some of it; one line with the first.
    """
    if problem := next(filter(None, (override.find_problem() for override in list_overrides())), None):
        raise SGLangMismatch(f"{problem}: install sglang=={get_installed_version()} as it was released")


def list_overrides() -> Iterator[Override]:
    """Yield every override in the modules that this process has imported."""
    symbols = [symbol for folder in sorted({*ADAPTERS.values()}) for symbol in read_symbols(folder)]
    marked = {symbol.name.rpartition(".")[2] for symbol in symbols if "." in symbol.name} - {"__init__"}
    for kind in _list_classes():
        bases = [base for base in kind.__mro__ if _get_package(base) == "sglang"]
        for name, value in vars(kind).items():
            functions = tuple(_list_functions(value))
            base = next((base for base in bases if _knows(base, name, value)), None)
            if bases and functions and (base is not None or name in marked):
                yield Override(kind, name, functions, base)


def _list_classes() -> Iterator[type]:
    ours = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == ours:
            yield from (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == name)


def _get_package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _list_functions(value: Any) -> Iterator[FunctionType]:
    """The functions of ours that ``value``, an attribute of a class, consists of; none if it is data."""
    parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    for part in map(inspect.unwrap, filter(None, parts)):
        if isinstance(part, FunctionType) and part.__code__.co_filename.startswith(FOLDER):
            yield part


def _knows(base: type, name: str, value: Any) -> bool:
    """Whether ``base`` has a method ``name``, or, where ours is a property, reads an attribute ``name``."""
    if name in vars(base) or not isinstance(value, property):
        return name in vars(base)
    return any(name in function.__code__.co_names for function in vars(base).values() if inspect.isfunction(function))


def _list_refused(ours: Any, theirs: Any) -> list[str]:
    """Parameters that callers of ``theirs`` must give, and ``ours`` does not take."""
    taken, parameters = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    kinds = {parameter.kind for parameter in taken.values()}
    if kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return []
    return [
        name
        for name, parameter in parameters.items()
        if name not in taken
        and parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
