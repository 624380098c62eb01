"""The memory that there is: of GPUs as a user describes them, or what a process may still take of this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Supply:
    """Memory to plan with."""

    kind: str
    """``cpu`` or ``cuda``."""
    free: int
    """Bytes that can be taken: on the GPU that has least, or on the whole machine."""
    total: int
    """Bytes of that GPU or of the machine."""

    @property
    def owner(self) -> str:
        """The beginning of a sentence on what is free."""
        return "each GPU has" if self.kind == "cuda" else "the machine has"


def measure_cpu_memory() -> Supply:
    """This machine's memory, for ranks on its CPU."""
    return Supply(kind="cpu", free=read_available_memory(), total=psutil.virtual_memory().total)


def measure_gpu_memory(text: str, ranks: int) -> Supply:
    """Empty GPUs as described: ``"8x80GB"``, GB as vendors say it, taken as GiB.

    Raises:
        ValueError: not of that form, or fewer GPUs than ranks.
    """
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)G(?:i?B)?", text, re.IGNORECASE)
    if match is None or int(match[1]) < 1 or float(match[2]) <= 0:
        raise ValueError(f"--gpus {text!r}: give a number and a size, e.g. 8x80GB")
    count, size = int(match[1]), int(float(match[2]) * GIB)
    if count < ranks:
        raise ValueError(f"{ranks} ranks need {ranks} GPUs, --gpus {text} has {count}: choose other --tp/--dp")
    return Supply(kind="cuda", free=size, total=size)


def read_available_memory(root: Path = ROOT) -> int:
    """Bytes that can be taken without swapping or hitting a cgroup limit (v1 and v2).

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return max(0, min([psutil.virtual_memory().available, *_read_cgroup_headrooms(root)]))


def _read_cgroup_headrooms(root: Path) -> list[int]:
    """What is left under the limit of each control group that this process is in, innermost first."""
    rooms: list[int] = []
    for mount, relative, names in _list_cgroups(root):
        # In a container the path may be that outside it: then only the mount's own group can be seen.
        folder = mount / relative.lstrip("/")
        for group in dict.fromkeys([folder, *folder.parents, mount]):
            if group == mount or mount in group.parents:
                rooms += _read_room(group, *names)
    return rooms


def _list_cgroups(root: Path) -> list[tuple[Path, str, tuple[str, str, str]]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    found: list[tuple[Path, str, tuple[str, str, str]]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((mount, path, ("memory.max", "memory.current", "inactive_file")))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found.append((mount / "memory", path, names))
    return found


def _read_room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """Limit minus usage of one group, if it has a limit; file cache that the kernel drops first is not usage."""
    try:
        limit, usage = int((group / limit_name).read_text()), int((group / usage_name).read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return []
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        cache = next(int(line.split()[1]) for line in lines if line.startswith(cache_name + " "))
    except (OSError, ValueError, StopIteration):
        cache = 0
    return [limit - usage + cache]
