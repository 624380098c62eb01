"""Every operation against local values, run on every rank by test_shm_backend.py; no test of its own."""

from __future__ import annotations

import itertools
import random
import time

import torch
import torch.distributed as dist

from .drawn import fewer
from .shm_values import BIG, FLOATS, INTS, Op, expected_reduction, same, values


def check_reductions(rank, n, group):
    ops_of = {
        torch.float32: [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX],
        torch.int32: [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR],
        torch.bool: [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR],
    }
    for dtype in FLOATS + INTS + [torch.bool]:
        kind = torch.float32 if dtype.is_floating_point else torch.bool if dtype == torch.bool else torch.int32
        lengths = [(Op.SUM, numel) for numel in (0, 1, 4096 // dtype.itemsize)]  # the operation is the same in all
        for i, (op, numel) in enumerate([*lengths, *itertools.product(ops_of[kind], (7, 30_001))]):
            inputs = [values(r, numel, dtype) for r in range(n)]
            want = expected_reduction(inputs, op)
            got = inputs[rank].clone()
            dist.all_reduce(got, op, group=group)
            same(got, want, ("all_reduce", dtype, op, numel))
            root = i % n
            got = inputs[rank].clone()
            dist.reduce(got, group_dst=root, op=op, group=group)
            same(got, want if rank == root else inputs[rank], ("reduce", dtype, op, numel))


def check_large_reductions(rank, n, group):
    for dtype, op in ((torch.float32, Op.SUM), (torch.bfloat16, Op.AVG), (torch.int64, Op.MAX)):
        numel = BIG // dtype.itemsize + 3
        inputs = [values(r, numel, dtype) for r in range(n)]
        got = inputs[rank].clone()
        dist.all_reduce(got, op, group=group)
        same(got, expected_reduction(inputs, op), (dtype, op))
        gathered = [torch.empty_like(got) for _ in range(n)]
        dist.all_gather(gathered, got, group=group)
        for other in gathered:
            same(other, got, "the result is the same bits on every rank")


def check_special_floats(rank, n, group):
    nan, inf = float("nan"), float("inf")
    for dtype in FLOATS:
        x = torch.tensor([nan if rank == 0 else 1.0, nan if rank == n - 1 else 1.0, inf, 65504.0], dtype=dtype)
        for op in (Op.MIN, Op.MAX, Op.SUM):
            y = x.clone()
            dist.all_reduce(y, op, group=group)
            assert y[:2].isnan().all() and y[2] == inf, (dtype, op, y)


def check_reduce_scatter(rank, n, group):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (0, 1, 1001, BIG // dtype.itemsize // n):
            inputs = [values(r, numel * n, dtype) for r in range(n)]
            want = expected_reduction(inputs, Op.SUM).view(n, numel)[rank]
            got = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter_tensor(got, inputs[rank], group=group)
            same(got, want, ("tensor", dtype, numel))
            got = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter(got, list(inputs[rank].view(n, numel)), group=group)
            same(got, want, ("list", dtype, numel))


def check_gathers(rank, n, group):
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.float16):
        for numel in (0, 1, 1001, BIG // dtype.itemsize // 2):
            inputs = [values(r, numel, dtype) for r in range(n)]
            flat = torch.empty(n * numel, dtype=dtype)
            dist.all_gather_into_tensor(flat, inputs[rank], group=group)
            same(flat, torch.cat(inputs))
            parts = [torch.empty(numel, dtype=dtype) for _ in range(n)]
            dist.all_gather(parts, inputs[rank], group=group)
            same(torch.cat(parts), flat)
            for root in range(n):
                parts = [torch.empty(numel, dtype=dtype) for _ in range(n)] if rank == root else None
                dist.gather(inputs[rank], parts, group_dst=root, group=group)
                if rank == root:
                    same(torch.cat(parts), flat)
                got = torch.empty(numel, dtype=dtype)
                source = [x.flip(0) for x in inputs] if rank == root else None
                dist.scatter(got, source, group_src=root, group=group)
                same(got, inputs[rank].flip(0))


def check_many_broadcasts_race(rank, n, group):
    """Roots take turns without any wait between: a rank may run ahead of a slow one."""
    g = torch.Generator().manual_seed(rank)
    for i in range(fewer(400)):
        x = torch.full((64,), rank * 1000 + i)
        if torch.rand((), generator=g) < 0.02:
            time.sleep(0.001)
        dist.broadcast(x, group_src=(i // 3) % n, group=group)
        assert (x == (i // 3) % n * 1000 + i).all(), i
        if i % 7 == 0:
            y = torch.tensor([rank + i])
            dist.all_reduce(y, group=group)
            assert y.item() == n * i + n * (n - 1) // 2


def check_random_sequence(rank, n, group, seed=0):
    """Operations in random order and sizes, with ranks that dawdle.

    Steps of different kinds must not run into each other, whoever writes and however far ahead a rank is.
    """
    same_for_all, own = random.Random(seed), random.Random(seed * 100 + rank)
    names = "all_reduce reduce broadcast gather scatter all_gather reduce_scatter all_to_all barrier".split()
    for i in range(fewer(600)):
        name = same_for_all.choice(names)
        numel = same_for_all.choice([0, 1, 63, 2000, 2000, 40_000, 150_000])
        root = same_for_all.randrange(n)
        if own.random() < 0.05:
            time.sleep(own.choice([0, 1e-5, 1e-3, 4e-3]))
        table = torch.arange(n).view(n, 1, 1) * 100 + torch.arange(n).view(1, n, 1) * 10 + i  # [from, to, 1]
        table = table.int().repeat(1, 1, numel)
        mine, own_column = table[rank].contiguous(), table[:, rank]
        if name == "barrier":
            dist.barrier(group=group)
        elif name in ("all_reduce", "reduce"):
            x = mine.clone()
            if name == "reduce":
                dist.reduce(x, group_dst=root, group=group)
            else:
                dist.all_reduce(x, group=group)
            same(x, table.sum(0).int() if name == "all_reduce" or rank == root else mine, (i, name))
        elif name == "broadcast":
            x = mine.clone()
            dist.broadcast(x, group_src=root, group=group)
            same(x, table[root], (i, name))
        elif name == "reduce_scatter":
            x = torch.empty(numel, dtype=torch.int32)
            dist.reduce_scatter_tensor(x, mine.view(-1), group=group)
            same(x, own_column.sum(0).int(), (i, name))
        elif name == "all_to_all":
            x = torch.empty_like(mine)
            dist.all_to_all_single(x, mine, group=group)
            same(x, own_column, (i, name))
        elif name == "all_gather":
            x = torch.empty(n * n, numel, dtype=torch.int32)
            dist.all_gather_into_tensor(x, mine, group=group)
            same(x.view(n, n, numel), table, (i, name))
        elif name == "gather":
            parts = [torch.empty_like(mine) for _ in range(n)] if rank == root else None
            dist.gather(mine, parts, group_dst=root, group=group)
            if rank == root:
                same(torch.stack(parts), table, (i, name))
        else:
            x = torch.empty(numel, dtype=torch.int32)
            dist.scatter(x, list(mine) if rank == root else None, group_src=root, group=group)
            same(x, table[root, rank], (i, name))


def check_all_to_all(rank, n, group):
    for scale in (0, 1, 40_000):  # the last: streams longer than the staging buffer, from few to one destination
        splits = [[(i * 5 + j * 3) % 4 * scale for j in range(n)] for i in range(n)]
        splits[0][n - 1] *= 9
        full = [values(r, sum(splits[r]) * 3, torch.float32).view(-1, 3) for r in range(n)]
        want = torch.cat([full[i].split(splits[i])[rank] for i in range(n)])
        receive = [splits[i][rank] for i in range(n)]
        got = torch.empty_like(want)
        dist.all_to_all_single(got, full[rank], receive, splits[rank], group=group)
        same(got, want, scale)
        parts = [torch.empty(s, 3) for s in receive]
        dist.all_to_all(parts, [x.contiguous() for x in full[rank].split(splits[rank])], group=group)
        same(torch.cat(parts), want, scale)
    x = values(rank, 8 * n, torch.int32)
    got = torch.empty_like(x)
    dist.all_to_all_single(got, x, group=group)
    same(got, torch.cat([values(r, 8 * n, torch.int32).view(n, 8)[rank] for r in range(n)]))


def check_non_contiguous(rank, n, group):
    def grid(r):
        return values(r, 600, torch.float32).view(20, 30)[:, ::2]

    base = torch.zeros(20, 30)
    x = base[:, ::2]
    x.copy_(grid(rank))
    dist.all_reduce(x, group=group)
    same(x, expected_reduction([grid(r).contiguous() for r in range(n)], Op.SUM))
    assert not base[:, 1::2].any()
    x.copy_(grid(rank))
    dist.broadcast(x, group_src=n - 1, group=group)
    same(x, grid(n - 1))


def check_async(rank, n, group):
    x = torch.tensor([float(rank)])
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    assert work.is_completed() and x.item() == n * (n - 1) / 2
    assert work.get_future().wait()[0].item() == x.item()


def check_send_recv(rank, n, group):
    right, left = (rank + 1) % n, (rank - 1) % n
    for numel in (0, 1, 1001, BIG // 4):  # all ranks send first
        work = dist.isend(values(rank, numel, torch.float32), group_dst=right, group=group)
        got = torch.empty(numel)
        dist.recv(got, group_src=left, group=group)
        work.wait()
        same(got, values(left, numel, torch.float32))
    got = torch.empty(BIG // 4)  # all ranks receive first
    todo = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, got, group=group, group_peer=left),
            dist.P2POp(dist.isend, values(rank, BIG // 4, torch.float32), group=group, group_peer=right),
        ]
    )
    for work in todo:
        work.wait()
    same(got, values(left, BIG // 4, torch.float32))
    # Tags pick messages out of their order; equal tags keep it, also when waited for backwards.
    if rank == 0:
        for tag, x in ((7, 1.0), (8, 2.0), (7, 3.0), (9, 4.0)):
            dist.send(torch.tensor([x]), group_dst=1, tag=tag, group=group)
    elif rank == 1:
        a, b, c, d = (torch.zeros(1) for _ in range(4))
        dist.recv(d, group_src=0, tag=9, group=group)
        first = dist.irecv(a, group_src=0, tag=7, group=group)
        second = dist.irecv(c, group_src=0, tag=7, group=group)
        second.wait()
        first.wait()
        dist.recv(b, group_src=0, tag=8, group=group)
        assert (a.item(), b.item(), c.item(), d.item()) == (1, 2, 3, 4)
