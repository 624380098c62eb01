"""Groups, their links, their threads and their ends, run on every rank by test_shm_backend.py; no test of its own."""

from __future__ import annotations

import threading
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sglang_pat.cpu import shm

from .drawn import fewer
from .ranks import emulated_link
from .shm_values import Op, same, values


def check_refusals(rank, n, group):
    """Refused before anything is sent: the group goes on working."""
    for call, says in (
        (lambda: dist.all_reduce(torch.ones(2), Op.BAND, group=group), "integer or bool"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3 * n), torch.ones(2), group=group), f"{n} times"),
        (lambda: dist.all_to_all_single(torch.ones(n), torch.ones(n), [1] * n, [2] * n, group=group), "sum to"),
        (lambda: dist.send(torch.ones(1), group_dst=rank, group=group), "another rank|itself|same"),
    ):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=says):
            call()
    dist.barrier(group=group)


def check_subgroups(rank, n, group):
    """Strided TP groups, a group of one, and many groups at once."""
    half = n // 2
    groups = [dist.new_group(list(range(g, n, half)), backend=shm.BACKEND) for g in range(half)]
    mine = groups[rank % half]
    x = torch.tensor([rank])
    dist.all_reduce(x, group=mine)
    assert x.item() == sum(range(rank % half, n, half))
    alone = [dist.new_group([r], backend=shm.BACKEND) for r in range(n)][rank]
    x = values(rank, 9, torch.float32)
    y = x.clone()
    dist.all_reduce(y, group=alone)
    dist.barrier(group=alone)
    out = torch.empty(9)
    dist.all_to_all_single(out, y, group=alone)
    same(out, x)
    many = [dist.new_group(list(range(n)), backend=shm.BACKEND) for _ in range(20)]
    for i, g in enumerate(many):
        x = torch.tensor([rank + i])
        dist.all_reduce(x, group=g)
        assert x.item() == n * i + n * (n - 1) // 2
    for g in [*many, mine, alone]:
        dist.destroy_process_group(g)


def check_idle_rank_sleeps(rank, n, group):
    dist.barrier(group=group)
    if rank == 0:
        time.sleep(0.2)
    before = time.process_time()
    dist.barrier(group=group)
    assert rank == 0 or time.process_time() - before < 0.05, time.process_time() - before


def check_emulated_link(rank, n, group):
    latency, bandwidth = 3e-3, 0.1e9
    with emulated_link(latency * 1e6, bandwidth / 1e9):
        linked = dist.new_group(list(range(n)), backend=shm.BACKEND)
    size = 400_000
    x, parts = torch.zeros(size // 4), torch.zeros(n, size // 4)
    cases = {
        "barrier": (0, lambda: dist.barrier(group=linked)),
        "all_reduce": (2 * (n - 1) / n * size, lambda: dist.all_reduce(x, group=linked)),
        "async": (2 * (n - 1) / n * size, lambda: dist.all_reduce(x, group=linked, async_op=True).wait()),
        "broadcast": (size, lambda: dist.broadcast(x, group_src=0, group=linked)),
        "all_gather": ((n - 1) * size, lambda: dist.all_gather_into_tensor(parts, x, group=linked)),
        "reduce_scatter": ((n - 1) * size, lambda: dist.reduce_scatter_tensor(x, parts, group=linked)),
        "all_to_all": ((n - 1) * size, lambda: dist.all_to_all_single(parts.clone(), parts, group=linked)),
    }
    for name, (sent, call) in cases.items():
        dist.barrier(group=group)
        start = time.perf_counter()
        call()
        took, least = time.perf_counter() - start, latency + sent / bandwidth
        assert took >= least, (name, took, least)
    dist.destroy_process_group(linked)


def check_wire_time_passes_while_a_rank_computes(rank, n, group):
    wire = 0.2
    with emulated_link(wire * 1e6, 1e6):
        linked = dist.new_group(list(range(n)), backend=shm.BACKEND)
    x = torch.zeros(1)
    for _ in range(5):  # a busy machine may take its time now and then
        dist.barrier(group=group)
        start = time.perf_counter()
        work = dist.all_reduce(x, group=linked, async_op=True)
        assert not work.is_completed() or time.perf_counter() - start >= wire
        dist.barrier(group=group)
        time.sleep(wire)
        start = time.perf_counter()
        work.wait()
        longest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(longest, Op.MAX, group=group)
        if longest < wire / 2:
            break
    assert longest < wire / 2, longest
    dist.destroy_process_group(linked)


def check_links_must_agree(rank, n, group):
    with emulated_link(1, 10 + rank), pytest.raises(ValueError, match="must emulate the same link"):
        dist.new_group(list(range(n)), backend=shm.BACKEND)


def check_threads(rank, n, group):
    """One group used by several threads: messages both ways beside collectives."""
    right, left = (rank + 1) % n, (rank - 1) % n
    errors = []

    def guarded(work):
        try:
            for i in range(fewer(200)):
                work(i)
        except BaseException:
            errors.append(traceback.format_exc())

    def send(i):
        dist.send(torch.full((i * 50,), i), group_dst=right, tag=1, group=group)

    def receive(i):
        x = torch.empty(i * 50, dtype=torch.int64)
        dist.recv(x, group_src=left, tag=1, group=group)
        assert (x == i).all()

    def reduce(i):
        x = torch.tensor([i])
        dist.all_reduce(x, group=group)
        assert x.item() == n * i

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (send, receive, reduce)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]


def check_failures(rank, n, group):
    """Groups of their own: each ends its group, nothing else."""

    def error(call, seconds=30):  # a group that noticed nothing waits for 60
        start = time.perf_counter()
        with pytest.raises(dist.DistBackendError) as caught:
            call()
        assert time.perf_counter() - start < seconds
        return str(caught.value)

    def fresh(**options):
        return dist.new_group(list(range(n)), backend=shm.BACKEND, **options)

    one, four = torch.ones(1), torch.ones(4)
    broken = fresh()
    text = error(lambda: dist.all_reduce(four if rank == 1 else one, group=broken))
    assert "do not match" in text and ("4 bytes" in text or "reports" in text), text
    assert "unusable" in error(lambda: dist.barrier(group=broken))

    broken = fresh(timeout=timedelta(seconds=1))
    if rank > 0:
        text = error(lambda: dist.barrier(group=broken))
        assert "timeout of 1000 ms" in text and "rank 0" in text, text
    dist.barrier(group=group)
    if rank == 0:
        assert "timeout" in error(lambda: dist.barrier(group=broken))

    broken = fresh()
    if rank == 0:
        time.sleep(0.1)
        broken._get_backend(torch.device("cpu")).abort()
    else:
        assert "aborted by rank 0" in error(lambda: dist.recv(one, group_src=0, group=broken))

    broken = fresh()
    if rank == 0:
        dist.destroy_process_group(broken)
    else:
        text = error(lambda: dist.barrier(group=broken))
        assert "rank 0" in text and "has shut the group down" in text, text
    dist.barrier(group=group)
