"""Free memory where control groups limit it."""

from __future__ import annotations

import psutil
import pytest

from sglang_pat.memory.memory_plan import read_available_memory

pytestmark = pytest.mark.unit

MIB = 1 << 20


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def test_without_groups_it_is_the_machine(root):
    assert abs(read_available_memory(root) - psutil.virtual_memory().available) < 1024 * MIB


@pytest.mark.parametrize(
    ("line", "groups", "available"),
    [
        ("0::/a/b", {"a/b": dict(max=100, current=70, stat=f"anon 1\ninactive_file {20 * MIB}\n")}, 50),
        ("0::/a/b", {"a": dict(max=60, current=50), "a/b": dict(max="max", current=5)}, 10),
        ("0::/docker/0123", {"": dict(max=40, current=10)}, 30),
        (
            "4:cpu,memory:/x",
            {"memory/x": dict(limit_in_bytes=90, usage_in_bytes=80, stat=f"total_inactive_file {5 * MIB}\n")},
            15,
        ),
        ("0::/", {"": dict(max=10, current=11)}, 0),
    ],
    ids=["version 2", "the tightest around", "in a container the mount is the group", "version 1", "over the limit"],
)
def test_what_a_group_leaves(root, line, groups, available):
    """Sizes are in MiB; a line is that of ``/proc/self/cgroup``, and a group a folder with files ``memory.*``."""
    (root / "proc/self/cgroup").write_text(line + "\n")
    for folder, files in groups.items():
        place = root / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (place / f"memory.{name}").write_text(str(value * MIB if isinstance(value, int) else value))
    assert read_available_memory(root) == available * MIB
