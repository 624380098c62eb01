"""All-to-all of one layer after another: the next layer is packed while one travels.

Both classes are used in the same way, by all ranks of a group together::

    transport.outgoing(0)                      # a flat buffer: pack layer 0: peers in order, what stays here last
    for layer in ...:
        transport.start(layer)
        transport.outgoing(layer + 1)          # pack the next one meanwhile
        transport.incoming(layer)              # waits; pieces to unpack

Layer ``i`` is unpacked before ``start(i + 1)``, and the buffer of layer ``i`` is packed again only after it: so two
buffers for what goes out are enough, and one for what comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from sglang_pat.comm import shm
from sglang_pat.cpu.windows import COUNT, Windows


@dataclass(frozen=True)
class Piece:
    """Elements of parts ``first`` to ``last - 1``, in order, in one flat buffer.

    Part ``i`` is from peer ``i``; the one behind the last peer's is what stays on this rank.
    """

    first: int
    last: int
    data: torch.Tensor


class Staging:
    """Device memory through which :class:`AllToAll` moves layers: two buffers that go out, one that comes in.

    Taken before a pause by :meth:`reserve`, given back after it by :meth:`release`; where a layer needs more than was
    reserved, it is taken then.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._largest = 0
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(COUNT + 1)]

    def reserve(self, out: int, into: int) -> None:
        """Have at least so many bytes in each buffer that goes out, and in the one that comes in.

        Raises:
            RuntimeError: the device has no memory left (``torch.OutOfMemoryError``).
        """
        if max(out, into) > self._largest:
            self._largest = max(out, into)
            self._empty_cache()
        for index, size in enumerate([out] * COUNT + [into]):
            if self._buffers[index].numel() < size:
                self._buffers[index] = torch.empty(0, dtype=torch.uint8, device=self._device)  # first give back
                self._buffers[index] = torch.empty(size, dtype=torch.uint8, device=self._device)

    def _empty_cache(self) -> None:
        """Give back the buffers of smaller switches: PyTorch's cache of this stream has them, and nobody else's can."""
        self.release()
        if torch.device(self._device).type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        self._buffers = [buffer.new_empty(0) for buffer in self._buffers]

    def take(self, out: int, into: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The buffers as so many elements of ``dtype``, 1-D; those that go out first."""
        sizes = [size * dtype.itemsize for size in [out] * COUNT + [into]]
        self.reserve(sizes[0], sizes[-1])
        return [buffer[:size].view(dtype) for buffer, size in zip(self._buffers, sizes, strict=True)]


def _wait(work: dist.Work | None) -> None:
    """Until the layer that was started last is here."""
    assert work is not None, "incoming comes after start"
    work.wait()


class AllToAll:
    """Through :class:`Staging` and the group's ``all_to_all_single``: any backend, any device.

    On CUDA the transfer runs on the backend's own stream beside the caller's.

    Args:
        elements: what each rank of the group sends to each, int ``[ranks, ranks]``, zero on the diagonal.
        staying: elements that go through the buffer without leaving this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, staging: Staging, elements: np.ndarray, staying: int, dtype: torch.dtype
    ) -> None:
        me = dist.get_rank(group)
        self._group = group
        self._out_splits, self._in_splits = elements[me].tolist(), elements[:, me].tolist()
        self._leaving = sum(self._out_splits)
        *self._out, self._in = staging.take(self._leaving + staying, sum(self._in_splits), dtype)
        self._work: dist.Work | None = None

    def outgoing(self, layer: int) -> torch.Tensor:
        return self._out[layer % COUNT]

    def start(self, layer: int) -> None:
        leaving = self.outgoing(layer)[: self._leaving]
        self._work = dist.all_to_all_single(
            self._in, leaving, self._in_splits, self._out_splits, group=self._group, async_op=True
        )

    def incoming(self, layer: int) -> list[Piece]:
        _wait(self._work)
        peers = len(self._in_splits)
        return [Piece(0, peers, self._in), Piece(peers, peers + 1, self.outgoing(layer)[self._leaving :])]


class Direct:
    """Through :class:`Windows`: peers unpack from where this rank packed.

    Before another transport begins all ranks must have met: a peer may still read the last layer.

    Args:
        members: rank in the windows' group of each rank of ``group``.
        elements, staying: as of :class:`AllToAll`.

    Raises:
        OSError, ValueError: this rank has no memory for the windows.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        windows: Windows,
        members: list[int],
        elements: np.ndarray,
        staying: int,
        dtype: torch.dtype,
    ) -> None:
        self._me = dist.get_rank(group)
        self._meet = shm.backend_of(group).meet
        self._windows, self._members = windows, members
        self._elements, self._dtype = elements, dtype
        self._ends = np.cumsum(elements, axis=1)
        self._leaving, self._staying = int(self._ends[self._me, -1]), staying
        self._size = self._leaving + staying
        self._busiest = int(max(elements.sum(axis=0).max(), elements.sum(axis=1).max())) * dtype.itemsize
        self._work: dist.Work | None = None
        windows.reserve(self._size * dtype.itemsize)

    def outgoing(self, layer: int) -> torch.Tensor:
        return self._windows.view(self._members[self._me], layer % COUNT, 0, self._size, self._dtype)

    def start(self, layer: int) -> None:
        # All have packed this layer when all are here, and all have unpacked the one before.
        self._work = self._meet(self._busiest)

    def incoming(self, layer: int) -> list[Piece]:
        _wait(self._work)
        pieces = []
        for peer, end in enumerate(self._ends[:, self._me].tolist()):
            count = int(self._elements[peer, self._me])
            if count:
                data = self._windows.view(self._members[peer], layer % COUNT, end - count, count, self._dtype)
                pieces.append(Piece(peer, peer + 1, data))
        if self._staying:
            peers = len(self._members)
            pieces.append(Piece(peers, peers + 1, self.outgoing(layer)[self._leaving :]))
        return pieces
