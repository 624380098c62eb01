"""Memory that a process may still take: the machine's, or less where a control group limits it."""

from __future__ import annotations

from pathlib import Path

import psutil

ROOT = Path("/")


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be taken without swapping or hitting a cgroup limit (v1 and v2).

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return max(0, min([psutil.virtual_memory().available, *_cgroup_rooms(root)]))


def _cgroup_rooms(root: Path) -> list[int]:
    """What is left under the limit of each control group that this process is in, innermost first."""
    rooms: list[int] = []
    for mount, relative, names in _memory_groups(root):
        # In a container the path may be that outside it: then only the mount's own group can be seen.
        folder = mount / relative.lstrip("/")
        for group in dict.fromkeys([folder, *folder.parents, mount]):
            if group == mount or mount in group.parents:
                rooms += _room(group, *names)
    return rooms


def _memory_groups(root: Path) -> list[tuple[Path, str, tuple[str, str, str]]]:
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


def _room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
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
