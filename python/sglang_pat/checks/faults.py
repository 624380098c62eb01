"""Injected faults, for the tests of the abort path and of dying ranks.

``SGLANG_PAT_FAULT="EXCHANGE:1:raise"`` makes rank 1 raise when it enters EXCHANGE;
``"QUIESCE:0:kill"`` kills rank 0 there, ``"QUIESCE:pid4711:kill"`` the rank with this process id.  A fourth field gives
the switch (epoch) it applies to; without it every switch is hit.  ``"@FILE"``: the fault is what the file says at that
moment, none if it is empty or missing, so that one engine can be put through several.  Unset, the check costs nothing.

``"QUIESCE:1:hold"``, in a file: rank 1 writes to the FIFO ``FILE.held``, and waits there until whoever reads it has
closed it.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

ENV = "SGLANG_PAT_FAULT"


class InjectedFault(RuntimeError):
    """The error that a ``raise`` fault raises."""


def check(state: str, rank: int, epoch: int) -> None:
    """Fail here if the environment says so.  ``state`` is the switch's, as ``SwitchState`` names it.

    Raises:
        InjectedFault: the fault is a ``raise`` and this is its place.
    """
    spec = os.environ.get(ENV)
    path = Path(spec[1:]) if spec and spec.startswith("@") else None
    spec = _read_fault(path) if path else spec
    if not spec:
        return
    where, who, action, *when = spec.split(":")
    if where != state or who not in (str(rank), f"pid{os.getpid()}") or (when and int(when[0]) != epoch):
        return
    if action == "hold" and path:
        return _hold(path)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise InjectedFault(f"injected fault in {state} on rank {rank}")


def get_hold_path(path: Path) -> Path:
    """The FIFO to which a rank writes that is held by a fault in ``path``."""
    return path.with_name(path.name + ".held")


def _read_fault(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _hold(path: Path) -> None:
    line = os.open(get_hold_path(path), os.O_WRONLY)
    os.write(line, b"held")
    closed = select.poll()
    closed.register(line, select.POLLERR)
    closed.poll()
    os.close(line)
