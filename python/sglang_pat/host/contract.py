"""The one host version these adapters are written for, and every symbol of it that they rely on.

``contract.txt`` lists the symbols with their parameters.  A new SGLang version fails here first, by name.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from importlib import metadata, resources

from sglang_pat.version import HOST_VERSION


class HostMismatch(RuntimeError):
    """The installed SGLang is not the one this package is written for."""


def installed_version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def check_host() -> None:
    """Raise :class:`HostMismatch` unless the installed SGLang is :data:`HOST_VERSION`."""
    installed = installed_version()
    if installed != HOST_VERSION:
        given = f"SGLang {installed} is installed" if installed else "SGLang is not installed"
        raise HostMismatch(
            f"{given}, --adaptive-tp needs {HOST_VERSION}: "
            f"install sglang=={HOST_VERSION} or leave out --adaptive-tp"
        )


@dataclass(frozen=True)
class Symbol:
    """A host symbol: ``module:name(parameters)``."""

    module: str
    name: str
    parameters: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Symbol:
        match = re.fullmatch(r"([\w.]+):([\w.]+)\((.*)\)", line)
        if match is None:
            raise ValueError(f"not a contract line: {line!r}")
        module, name, parameters = match.groups()
        return cls(module, name, tuple(parameters.split(", ")) if parameters else ())

    def problem(self) -> str | None:
        """What is wrong with the host's symbol, or None."""
        try:
            found = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"missing: {error}"
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != self.parameters:
            changed = sorted(set(parameters) ^ set(self.parameters)) or ["their order"]
            return f"parameters changed: {', '.join(changed)}"
        return None


def symbols() -> list[Symbol]:
    """All symbols of ``contract.txt``."""
    text = resources.files(__package__).joinpath("contract.txt").read_text()
    return [Symbol.parse(line) for line in text.splitlines() if line and not line.startswith("#")]
