"""Free memory where control groups limit it."""

from __future__ import annotations

import psutil
import pytest

from sglang_pat.memory.plan import read_available_memory

pytestmark = pytest.mark.unit

MIB = 1 << 20


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def group(root, line: str, folder: str, **files) -> None:
    (root / "proc/self/cgroup").write_text(line + "\n")
    place = root / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(str(text))


def test_without_groups_it_is_the_machine(root):
    assert abs(read_available_memory(root) - psutil.virtual_memory().available) < 1024 * MIB


def test_version_2(root):
    stat = f"anon 1\ninactive_file {20 * MIB}\n"
    group(root, "0::/a/b", "a/b", memory__max=100 * MIB, memory__current=70 * MIB, memory__stat=stat)
    assert read_available_memory(root) == 50 * MIB


def test_the_tightest_of_the_groups_around(root):
    group(root, "0::/a/b", "a", memory__max=60 * MIB, memory__current=50 * MIB)
    group(root, "0::/a/b", "a/b", memory__max="max", memory__current=5 * MIB)
    assert read_available_memory(root) == 10 * MIB


def test_in_a_container_the_mount_is_the_group(root):
    group(root, "0::/docker/0123", "", memory__max=40 * MIB, memory__current=10 * MIB)
    assert read_available_memory(root) == 30 * MIB


def test_version_1(root):
    files = dict(memory__limit_in_bytes=90 * MIB, memory__usage_in_bytes=80 * MIB)
    group(root, "4:cpu,memory:/x", "memory/x", **files, memory__stat=f"total_inactive_file {5 * MIB}\n")
    assert read_available_memory(root) == 15 * MIB


def test_over_the_limit_is_nothing(root):
    group(root, "0::/", "", memory__max=10 * MIB, memory__current=11 * MIB)
    assert read_available_memory(root) == 0
