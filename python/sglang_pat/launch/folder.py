"""This process's private folder: its sockets lie in it, and no other user can reach them (mode 0700).

Made on first use and removed at exit.  What a killed process left behind is removed by the next one that makes its own:
an owner holds a lock, which the kernel gives back when the owner dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from functools import cache
from itertools import count
from multiprocessing import util
from pathlib import Path

PREFIX = "sglang_pat-"
LOCK = "owner"
LONGEST = 50
"""Characters of the temporary folder's path: a socket's path has 107 at most."""
NEW_SECONDS = 60
"""A folder without a lock may be one that is just being made."""

_numbers = count()


@cache
def private_folder() -> Path:
    """The folder, made now if there is none.

    Raises:
        ValueError: there is no place for it; one line.
    """
    places = [Path(tempfile.gettempdir()), Path("/tmp")] if _is_there() else [Path("/tmp")]
    problem = "there is none"
    for place in places:
        if len(str(place)) > LONGEST:
            problem = f"{place} is too long for the path of a socket"
            continue
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as error:
            problem = f"{place}: {error.strerror}"
            continue
        _own(folder)
        sweep(place)
        return folder
    raise ValueError(f"no temporary folder for sockets ({problem}): set TMPDIR to a folder that can be written")


def _is_there() -> bool:
    try:
        return bool(tempfile.gettempdir())
    except OSError:
        return False


def _own(folder: Path) -> None:
    # Open for the life of this process.
    fcntl.flock(os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)
    # In this process only, and after ``multiprocessing`` has removed its own folder (priority -100), which lies in it.
    util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)


def engine_folder() -> Path:
    """A new folder in it, for one engine's sockets; whoever made it removes it."""
    folder = private_folder() / str(next(_numbers))
    folder.mkdir(mode=0o700)
    return folder


def remove() -> None:
    """Remove the folder now: this process will not end in order."""
    if private_folder.cache_info().currsize:
        shutil.rmtree(private_folder(), ignore_errors=True)
        private_folder.cache_clear()


def sweep(place: Path) -> list[Path]:
    """Remove the folders in ``place`` whose owners are gone; returns them."""
    gone = []
    for folder in place.glob(PREFIX + "*"):
        try:
            if folder.stat().st_uid == os.getuid() and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
        except OSError:  # removed meanwhile
            continue
    return gone


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > NEW_SECONDS
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
