"""Layers from rank to rank: through windows and through an all-to-all, against what was put in."""

from __future__ import annotations

import mmap
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sglang_pat.cpu import shm
from sglang_pat.cpu.windows import Windows
from sglang_pat.switch.kv import AllGather, AllToAll, DirectTransfer, Staging

from .ranks import emulated_link, run_ranks

pytestmark = [
    pytest.mark.unit,
    pytest.mark.slow,
    pytest.mark.xdist_group(run_ranks.__module__),  # one server that forks ranks
    pytest.mark.skipif(not shm.is_available(), reason="the extension sglang_pat._C is not built"),
]

CAPACITY = 1 << 20


def content(source: int, target: int, layer: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + source + 10 * target + 100 * layer)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


def carry(
    transport, rank: int, elements: np.ndarray, staying: int, layers: int, dtype: torch.dtype, rng
) -> None:  # fmt: skip
    """Every rank packs late or early, and takes its time to unpack."""
    n = len(elements)

    def dawdle() -> None:
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.003)

    def pack(layer: int) -> None:
        dawdle()
        parts = [content(rank, peer, layer, int(elements[rank, peer]), dtype) for peer in range(n)]
        parts.append(content(rank, rank, layer, staying, dtype))
        transport.get_outgoing(layer).copy_(torch.cat(parts))

    pack(0)
    for layer in range(layers):
        transport.start(layer)
        if layer + 1 < layers:
            pack(layer + 1)
        dawdle()
        pieces = transport.get_incoming(layer)
        seen = [peer for piece in pieces for peer in range(piece.first, piece.last)]
        assert seen == sorted(set(seen)) and all(elements[p, rank] == 0 for p in set(range(n)) - set(seen))
        assert n in seen or not staying
        for piece in pieces:
            wanted = [
                content(p, rank, layer, int(elements[p, rank]), dtype)
                if p < n
                else content(rank, rank, layer, staying, dtype)
                for p in range(piece.first, piece.last)
            ]
            assert torch.equal(piece.data, torch.cat(wanted)), (rank, layer, piece.first)


def carry_many(rank: int, n: int) -> None:
    windows = Windows(dist.group.WORLD, CAPACITY)
    staging, everyone = Staging("cpu"), list(range(n))
    for seed in range(12):
        shared = np.random.default_rng(seed)
        own = np.random.default_rng([seed, rank])
        elements = shared.integers(0, shared.choice([2, 50, 20_000]), (n, n)) * shared.integers(0, 2, (n, n))
        np.fill_diagonal(elements, 0)
        staying = int(own.choice([0, 1, 5000]))
        dtype = [torch.float32, torch.bfloat16, torch.uint8][seed % 3]
        layers = int(shared.integers(1, 8))
        direct = DirectTransfer(dist.group.WORLD, windows, everyone, elements, staying, dtype)
        carry(direct, rank, elements, staying, layers, dtype, own)
        through_copies = AllToAll(dist.group.WORLD, staging, elements, staying, dtype)
        carry(through_copies, rank, elements, staying, layers, dtype, own)
        most = int(elements.sum(axis=1).max()) + 5000
        gathered = AllGather(dist.group.WORLD, elements, staying, most, torch.empty(0, dtype=dtype))
        carry(gathered, rank, elements, staying, layers, dtype, own)
        leaving = int(elements[rank].sum())
        assert (direct.sent, through_copies.sent, gathered.sent) == (leaving, leaving, (n - 1) * most)
    check_windows(windows)


def check_windows(windows: Windows) -> None:
    windows.resize(100)
    assert 100 <= windows.reserved <= mmap.PAGESIZE
    windows.reserve(CAPACITY)
    windows.reserve(100)
    assert windows.reserved == CAPACITY
    windows.resize(0)
    assert windows.reserved == 0
    with pytest.raises(ValueError, match="1048577 bytes do not fit a window of 1048576"):
        windows.reserve(CAPACITY + 1)


def carry_in_pairs(rank: int, n: int) -> None:
    """Two exchange groups of a world of four at a time, with the windows of the world."""
    windows = Windows(dist.group.WORLD, CAPACITY)
    for pairs in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        groups = [dist.new_group(pair, backend=shm.BACKEND) for pair in pairs]
        group, members = next((g, p) for g, p in zip(groups, pairs, strict=True) if rank in p)
        for seed in range(10):
            elements = np.random.default_rng([seed, members[0]]).integers(0, 3000, (2, 2)) * (1 - np.eye(2, dtype=int))
            transport = DirectTransfer(group, windows, members, elements, 7, torch.int64)
            carry(transport, members.index(rank), elements, 7, 4, torch.int64, np.random.default_rng([seed, rank]))
            dist.barrier()  # as the vote after an exchange: nobody reads any more


class OtherStream:
    """A transfer on a stream of its own, as NCCL's: it may read and write any time between its launch and the moment
    that is waited for it.  This one does so at the very end, or (``early``) at the very beginning."""

    def __init__(self, early: bool) -> None:
        self._early, self._transfer = early, dist.all_to_all_single

    def __call__(self, into, out, in_splits, out_splits, group, async_op) -> OtherStream:
        assert async_op
        self._rest = lambda: self._transfer(into, out, in_splits, out_splits, group=group)
        if self._early:
            self.wait()
        return self

    def wait(self) -> None:
        rest, self._rest = self._rest, lambda: None
        rest()


class OneBuffer(AllToAll):
    """Packs a layer where the one before may still be read."""

    def get_outgoing(self, layer: int) -> torch.Tensor:
        return super().get_outgoing(0)


def carry_on_another_stream(rank: int, n: int, kind: type[AllToAll], early: bool) -> bool:
    """Whether every layer arrived as it was sent."""
    from sglang_pat.switch import kv

    kv.dist.all_to_all_single, transfer = OtherStream(early), dist.all_to_all_single
    try:
        elements = 1000 * (1 - np.eye(n, dtype=int))
        carried = kind(dist.group.WORLD, Staging("cpu"), elements, 300, torch.float32)
        carry(carried, rank, elements, 300, 6, torch.float32, np.random.default_rng(rank))
    except AssertionError:
        return False
    finally:
        kv.dist.all_to_all_single = transfer
    return True


IN_TURN, TRIES = 0.105, 100


def through_a_link(rank: int, n: int) -> float:
    """Seconds of ten layers: packing that takes 5 ms, in turn with a layer that travels for 5 ms.

    A busy machine adds to it.  So it is tried until both ranks are faster than in turn, at most :data:`TRIES` times.
    """
    with emulated_link(0, 0.02):
        group = dist.new_group(list(range(n)), backend=shm.BACKEND)
    elements = np.array([[0, 100_000], [100_000, 0]])
    transport = DirectTransfer(group, Windows(group, CAPACITY), [0, 1], elements, 0, torch.uint8)

    def ten_layers() -> float:
        dist.barrier(group)
        began = time.perf_counter()
        time.sleep(0.005)
        for layer in range(10):
            transport.start(layer)
            time.sleep(0.005)
            transport.get_incoming(layer)
        return time.perf_counter() - began

    for _ in range(TRIES):
        slowest = torch.tensor(ten_layers())
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if slowest < IN_TURN:
            break
    return float(slowest)


@pytest.mark.parametrize("n", [2, 4])
def test_every_layer_arrives(n):
    assert run_ranks(n, carry_many) == [None] * n


@pytest.mark.parametrize("early", [False, True])
def test_no_layer_is_touched_while_it_travels(early):
    assert run_ranks(2, carry_on_another_stream, AllToAll, early) == [True, True]


def test_a_buffer_that_is_reused_too_early_is_found_out():
    assert False in run_ranks(2, carry_on_another_stream, OneBuffer, False)


def test_exchange_groups_of_a_larger_world():
    assert run_ranks(4, carry_in_pairs) == [None] * 4


def test_packing_hides_behind_an_emulated_link():
    """100,000 bytes at 0.02 GB/s are 5 ms: in turn ten layers would sleep and travel for 0.105 s, on any machine."""
    for seconds in run_ranks(2, through_a_link):
        assert 0.055 <= seconds < IN_TURN
