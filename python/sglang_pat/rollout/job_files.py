"""Jobs in a folder: ``JOB.json`` is the state now, ``JOB.past/N.json`` that at the end of round N.

Files are written whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from sglang_pat import files
from sglang_pat.rollout.history import KEPT


class JobFiles:
    """What is kept of each job.  Every method may raise OSError.

    Args:
        folder: exists; a job's name must be the name of a file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, job: str) -> Path:
        return self._folder / f"{job}.json"

    def __contains__(self, job: str) -> bool:
        return self.path(job).exists()

    def __len__(self) -> int:
        """Jobs that are kept."""
        return sum(1 for _ in self._folder.glob("*.json"))

    def write(self, job: str, data: bytes | Iterable[bytes], ended: int | None = None) -> None:
        """The state now.

        Args:
            data: see ``files.write``.
            ended: number of the round that has just ended; None: it is not the end of one.
        """
        file = self.path(job)
        files.write(data, file)
        if ended is None:
            return
        past = self._past(job)
        past.mkdir(exist_ok=True)
        # The same file under another name: the next state replaces the first name only.
        kept = past / f"{ended}.json"
        kept.unlink(missing_ok=True)
        try:
            os.link(file, kept)
        except OSError:  # a file system without hard links
            files.write(file.read_bytes(), kept)
        for number in self.past(job):
            if not ended - KEPT <= number <= ended:
                (past / f"{number}.json").unlink(missing_ok=True)

    def read(self, job: str, number: int | None = None) -> bytes:
        """``number``: as at the end of that round."""
        file = self.path(job) if number is None else self._past(job) / f"{number}.json"
        return file.read_bytes()

    def past(self, job: str) -> list[int]:
        """Rounds at whose ends the state is kept."""
        return sorted(int(file.stem) for file in self._past(job).glob("*.json") if file.stem.isdecimal())

    def remove(self, job: str) -> None:
        shutil.rmtree(self._past(job), ignore_errors=True)
        self.path(job).unlink(missing_ok=True)

    def _past(self, job: str) -> Path:
        return self._folder / f"{job}.past"
