"""SGLang versions these adapters are written for, and every symbol of each that they rely on.

``contract.txt`` in the adapter's folder lists the symbols with their parameters.  A new SGLang version fails here
first, by name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from sglang_pat.errors import format_one_line
from sglang_pat.version import ADAPTERS, SGLANG_VERSIONS


class SGLangMismatch(RuntimeError):
    """The installed SGLang is not the one this package is written for."""


def get_installed_version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def find_folder() -> str:
    """Name of the folder in ``host`` for the SGLang that is installed; for another version, which is refused at start,
    that of the first."""
    return ADAPTERS.get(get_installed_version() or "", ADAPTERS[SGLANG_VERSIONS[0]])


def check_sglang() -> None:
    """Raise :class:`SGLangMismatch` unless the installed SGLang is one of :data:`SGLANG_VERSIONS`."""
    installed = get_installed_version()
    if installed not in SGLANG_VERSIONS:
        status = f"SGLang {installed} is installed" if installed else "SGLang is not installed"
        raise SGLangMismatch(
            f"{status}, --adaptive-tp needs {' or '.join(SGLANG_VERSIONS)}: "
            f"install sglang=={SGLANG_VERSIONS[0]} or leave out --adaptive-tp"
        )


@dataclass(frozen=True)
class Symbol:
    """``module:name(parameters)`` of SGLang; ``~module:name(parameters)`` is read in the source, not imported."""

    module: str
    name: str
    parameters: tuple[str, ...]
    read: bool = False

    @classmethod
    def parse(cls, line: str) -> Symbol:
        match = re.fullmatch(r"(~?)([\w.]+):([\w.]+)\((.*)\)", line)
        if match is None:
            raise ValueError(f"not a contract line: {line!r}")
        read, module, name, parameters = match.groups()
        return cls(module, name, tuple(parameters.split(", ")) if parameters else (), bool(read))

    def find_problem(self) -> str | None:
        """A line on what is wrong with SGLang's symbol, or None."""
        try:
            parameters = self._read() if self.read else self._import()
        except (ImportError, AttributeError, OSError) as error:
            return f"missing: {format_one_line(error)}"
        if parameters != self.parameters:
            changed = sorted(set(parameters) ^ set(self.parameters)) or ["their order"]
            return f"parameters changed: {', '.join(changed)}"
        return None

    def _import(self) -> tuple[str, ...]:
        symbol: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            symbol = getattr(symbol, part)
        return tuple(inspect.signature(symbol).parameters)

    def _read(self) -> tuple[str, ...]:
        """Names of the symbol's parameters, read from the source: what needs CUDA cannot be imported everywhere."""
        top, *rest = self.module.split(".")
        spec = importlib.util.find_spec(top)  # imports nothing
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"no package {top}")
        path = Path(spec.submodule_search_locations[0]).joinpath(*rest)
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        symbol: Any = ast.parse(path.read_text())
        for part in self.name.split("."):
            named = (node for node in symbol.body if getattr(node, "name", None) == part)
            symbol = next(named, None)
            if symbol is None:
                raise AttributeError(f"{self.module} has no {self.name}")
        kinds = symbol.args
        named = [*kinds.posonlyargs, *kinds.args, kinds.vararg, *kinds.kwonlyargs, kinds.kwarg]
        bound = any(getattr(one, "id", None) == "classmethod" for one in symbol.decorator_list)
        return tuple(one.arg for one in named if one is not None)[bound:]


def read_symbols(folder: str | None = None) -> list[Symbol]:
    """All symbols of the ``contract.txt`` of a version; of the one that is installed without its ``folder``."""
    text = resources.files("sglang_pat").joinpath("host", folder or find_folder(), "contract.txt").read_text()
    return [Symbol.parse(line) for line in text.splitlines() if line and not line.startswith("#")]
