"""Rows of routed experts by KV slot, some of which still come after a switch (``host/routed_experts.py``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

import numpy as np
import torch

PIECE = 4096
"""Number of rows that are copied at once: few enough to stay in a core's cache between reading and writing."""


class Table:
    """Rows by KV slot, some of which a thread may still be copying; who reads waits for it.

    A slot may be written before its row comes: its request has ended, and the slot is another's.  Then none comes.

    Args:
        rows: the rows, ``[slots, ...]``.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._awaited = np.zeros(len(rows), dtype=bool)
        self._lock = Lock()
        self._copying: Future | None = None

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        self.wait()
        return self._rows[slots]

    def __setitem__(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        with self._lock:
            self._rows[slots] = rows
            self._awaited[slots.numpy()] = False

    def wait(self) -> None:
        """Wait until no row is awaited; raises what copying has raised."""
        if self._copying is not None:
            self._copying.result()
            self._copying = None

    def await_rows(self, slots: np.ndarray, begin: Callable[[], Future]) -> None:
        """Await rows of ``slots`` from :meth:`copy`, in the thread that ``begin`` sets to work."""
        self._awaited[:] = False
        self._awaited[slots] = True
        self._copying = begin()

    def copy(self, source: torch.Tensor, old: np.ndarray, new: np.ndarray) -> None:
        """Copy the rows ``old`` of ``source``, which nobody writes, to ``new``, where they are still awaited.

        It uses numpy, which on one core takes a third of torch's time for small integers.
        """
        read, written = source.numpy(), self._rows.numpy()
        for begin in range(0, len(old), PIECE):
            rows, slots = read.take(old[begin : begin + PIECE], axis=0), new[begin : begin + PIECE]
            with self._lock:
                left = self._awaited[slots]
                written[slots[left]] = rows[left]
