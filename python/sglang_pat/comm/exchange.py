"""All-to-all of one layer after another: the next layer is packed while one travels.

Both classes are used in the same way, by all ranks of a group together::

    exchange.outgoing(0)                      # a flat buffer: pack layer 0: peers in order, what stays here last
    for layer in ...:
        exchange.start(layer)
        exchange.outgoing(layer + 1)          # pack the next one meanwhile
        exchange.incoming(layer)              # waits; pieces to unpack

Layer ``i`` is unpacked before ``start(i + 1)``, and the buffer of layer ``i`` is packed again only after it: so two
buffers for what goes out are enough, and one for what comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from sglang_pat.comm import shm
from sglang_pat.comm.windows import COUNT, Windows


@dataclass(frozen=True)
class Piece:
    """Elements of parts ``first`` to ``last - 1``, in order, in one flat buffer.

    Part ``i`` is from peer ``i``; the one behind the last peer's is what stays on this rank.
    """

    first: int
    last: int
    data: torch.Tensor


class AllToAll:
    """With buffers of its own and the group's ``all_to_all_single``: any backend, any device.

    On CUDA the transfer runs on the backend's own stream beside the caller's.

    Args:
        elements: what each rank of the group sends to each, int ``[ranks, ranks]``, zero on the diagonal.
        staying: elements that go through the buffer without leaving this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, elements: np.ndarray, staying: int, dtype: torch.dtype, device: str
    ) -> None:
        me = dist.get_rank(group)
        self._group = group
        self._out_splits, self._in_splits = elements[me].tolist(), elements[:, me].tolist()
        self._leaving = sum(self._out_splits)
        self._out = [torch.empty(self._leaving + staying, dtype=dtype, device=device) for _ in range(COUNT)]
        self._in = torch.empty(sum(self._in_splits), dtype=dtype, device=device)
        self._work: dist.Work | None = None

    def outgoing(self, layer: int) -> torch.Tensor:
        return self._out[layer % COUNT]

    def start(self, layer: int) -> None:
        leaving = self.outgoing(layer)[: self._leaving]
        self._work = dist.all_to_all_single(
            self._in, leaving, self._in_splits, self._out_splits, group=self._group, async_op=True
        )

    def incoming(self, layer: int) -> list[Piece]:
        self._work.wait()
        peers = len(self._in_splits)
        return [Piece(0, peers, self._in), Piece(peers, peers + 1, self.outgoing(layer)[self._leaving :])]


class Direct:
    """Through :class:`Windows`: peers unpack from where this rank packed.

    Before another exchange all ranks must have met: a peer may still read the last layer.

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
        self._work.wait()
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
