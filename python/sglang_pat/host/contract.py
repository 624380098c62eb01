"""The one host version these adapters are written for, and a check of every symbol they rely on."""

from __future__ import annotations

from sglang_pat.version import HOST_VERSION


class HostMismatch(RuntimeError):
    """The installed SGLang is not the one this package is written for."""


def check_host() -> None:
    """Raise :class:`HostMismatch` unless the installed SGLang is :data:`HOST_VERSION`."""
    from sglang.version import __version__ as installed

    if installed != HOST_VERSION:
        raise HostMismatch(
            f"SGLang {installed} is installed, --adaptive-tp needs {HOST_VERSION}: "
            f"install sglang=={HOST_VERSION} or leave out --adaptive-tp"
        )
