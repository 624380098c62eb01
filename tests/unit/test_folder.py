"""The private folder: only the owner enters it, and what the dead left is removed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from sglang_pat.launch import folder

pytestmark = pytest.mark.unit

MAKE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from sglang_pat.launch import folder
folder.LONGEST = 1000
made = folder.private_folder()
(folder.engine_folder() / "socket").touch()
print(made, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """A process with a folder in ``tmp_path``."""
    command = [sys.executable, "-c", MAKE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.folder = process.stdout.readline().strip()
        yield process
        process.kill()


def test_it_is_private_and_goes_with_its_process(owner, tmp_path):
    (made,) = tmp_path.iterdir()
    assert str(made) == owner.folder and stat.S_IMODE(made.stat().st_mode) == 0o700
    assert (made / "0" / "socket").exists()
    owner.stdin.close()
    assert owner.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_dead_left_is_swept(owner, tmp_path):
    assert folder.sweep(tmp_path) == []
    owner.kill()
    owner.wait()
    (left,) = tmp_path.iterdir()
    assert folder.sweep(tmp_path) == [left]


def test_a_folder_that_is_just_being_made_stays(tmp_path):
    made = tmp_path / (folder.PREFIX + "x")
    made.mkdir()
    assert folder.sweep(tmp_path) == []
    os.utime(made, (0, 0))
    assert folder.sweep(tmp_path) == [made]


def test_others_are_not_touched(tmp_path):
    (tmp_path / "sglang_pat_server.log").touch()
    (tmp_path / "else").mkdir()
    assert folder.sweep(tmp_path) == [] and len(list(tmp_path.iterdir())) == 2
