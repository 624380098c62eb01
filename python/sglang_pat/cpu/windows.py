"""Memory of each rank that the others of its group read directly: two windows a rank.

What one rank packs into its window the others unpack from there: every byte is written once and read once, where an
all-to-all through a backend's own buffers copies it twice more.  CPU only; all ranks on one node.

Memory files (``memfd``) have no name, so a killed rank leaves nothing behind, and do not count against ``/dev/shm``.
Address space for the largest use is taken at once; memory only by :meth:`Windows.resize` and :meth:`Windows.reserve`.
"""

from __future__ import annotations

import mmap
import os

import torch
import torch.distributed as dist

POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` (Linux 5.14): page tables are filled now and not in the first use."""

COUNT = 2
"""Windows of a rank: one is read while the next is written."""


class Windows:
    """The windows of all ranks of a group.

    Life cycle: made once, by all ranks of ``group`` together; :meth:`resize` or :meth:`reserve` before each use.

    Attributes:
        capacity: most bytes of one window.
        reserved: bytes of each of this rank's windows for which there is memory.

    Args:
        capacity: bytes of one window at most.

    Raises:
        OSError: on every rank, if a rank cannot see another's memory (they need one pid namespace).
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int) -> None:
        self.capacity = _round_up_to_pages(capacity)
        self.reserved = 0
        self._fd = os.memfd_create("sglang_pat_windows", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, COUNT * self.capacity)
        size = dist.get_world_size(group)
        places = [(0, 0)] * size
        dist.all_gather_object(places, (os.getpid(), self._fd), group=group)
        self._maps, problem = [], None
        for pid, fd in places:
            try:
                with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
                    self._maps.append(mmap.mmap(file.fileno(), COUNT * self.capacity))
            except OSError as error:
                problem = f"cannot map the memory of process {pid}: {error}"
                break
        # All ranks have it, or none: they must use the same way.
        problems: list[str | None] = [None] * size
        dist.all_gather_object(problems, problem, group=group)
        if any(problems):
            os.close(self._fd)
            raise OSError("; ".join(text for text in problems if text))
        self._mine = self._maps[dist.get_rank(group)]
        self._views = [torch.frombuffer(memory, dtype=torch.uint8) for memory in self._maps]

    def resize(self, size: int) -> None:
        """Have memory for ``size`` bytes in each of this rank's windows, and give back what is beyond that.

        Not while a window is in use.

        Raises:
            ValueError: more than the capacity.
            OSError: there is not enough memory.
        """
        if _round_up_to_pages(size) < self.reserved:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, COUNT * self.capacity)
            self.reserved = 0
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Have memory for at least so many bytes in each of this rank's windows.  Raises as :meth:`resize`."""
        if not 0 <= size <= self.capacity:
            raise ValueError(f"{size} bytes do not fit a window of {self.capacity}")
        if _round_up_to_pages(size) <= self.reserved:
            return
        for start in range(0, COUNT * self.capacity, self.capacity):
            # Raises where a first touch would be a SIGBUS.
            os.posix_fallocate(self._fd, start, _round_up_to_pages(size))
            try:
                self._mine.madvise(POPULATE_WRITE, start, _round_up_to_pages(size))
            except OSError:
                pass  # an older kernel: pages are mapped as they are touched
        self.reserved = _round_up_to_pages(size)

    def get_view(self, rank: int, which: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements of a window: group rank, number of the window, offset in elements; 1-D, not a copy."""
        start = which * self.capacity + offset * dtype.itemsize
        return self._views[rank][start : start + numel * dtype.itemsize].view(dtype)


def _round_up_to_pages(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
