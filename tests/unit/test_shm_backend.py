"""The shared-memory backend: every operation against local values, and what happens when a rank fails.

Two and four processes are started once each and run all ``check_*`` functions; failures come back by name.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import signal
import struct
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_pat.comm import shm

from .ranks import emulated_link, run_ranks

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not shm.is_available(), reason="the extension sglang_pat._C is not built"),
]

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
BIG = 5_000_000  # bytes; several pieces
Op = dist.ReduceOp


def segments() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("sglang_pat_*")}


def assert_no_segment_left(before: set[str]) -> None:
    for _ in range(50):  # another run on this machine may have one for an instant, while it creates a group
        if not segments() - before:
            return
        time.sleep(0.1)
    raise AssertionError(f"segments left: {segments() - before}")


# ---- expected values ----


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=g).bool()
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=g) * 3).to(dtype)
    return torch.randint(0, 100, (numel,), generator=g).to(dtype)


def expected_reduction(inputs: list[torch.Tensor], op) -> torch.Tensor:
    """In rank order; half types in float32 with one rounding; bit for bit what the backend promises."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        combine = torch.logical_or if op in (Op.SUM, Op.MAX, Op.BOR) else torch.logical_and
        return functools.reduce(combine, inputs)
    if dtype in (torch.bfloat16, torch.float16):
        inputs = [x.float() for x in inputs]
    if op == Op.AVG and not dtype.is_floating_point:
        inputs = [x.long() for x in inputs]
    combine = {
        Op.SUM: torch.add,
        Op.AVG: torch.add,
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }[op]
    total = functools.reduce(combine, inputs)
    if op == Op.AVG:
        n = len(inputs)
        total = total / n if dtype.is_floating_point else torch.div(total, n, rounding_mode="trunc")
    return total.to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, what="") -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.equal(got.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)), what


# ---- checks, run on every rank ----


def check_reductions(rank, n, group):
    ops_of = {
        torch.float32: [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX],
        torch.int32: [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR],
        torch.bool: [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR],
    }
    for dtype in FLOATS + INTS + [torch.bool]:
        kind = torch.float32 if dtype.is_floating_point else torch.bool if dtype == torch.bool else torch.int32
        for i, (op, numel) in enumerate(itertools.product(ops_of[kind], (0, 1, 7, 4096 // dtype.itemsize, 30_001))):
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


def check_broadcast(rank, n, group):
    for numel in (0, 1, 1001, BIG // 4):
        for root in range(n):
            got = values(rank, numel, torch.float32)
            dist.broadcast(got, group_src=root, group=group)
            same(got, values(root, numel, torch.float32))


def check_many_broadcasts_race(rank, n, group):
    """Roots take turns without any wait between: a rank may run ahead of a slow one."""
    g = torch.Generator().manual_seed(rank)
    for i in range(400):
        x = torch.full((64,), rank * 1000 + i)
        if torch.rand((), generator=g) < 0.02:
            time.sleep(0.001)
        dist.broadcast(x, group_src=(i // 3) % n, group=group)
        assert (x == (i // 3) % n * 1000 + i).all(), i
        if i % 7 == 0:
            y = torch.tensor([rank + i])
            dist.all_reduce(y, group=group)
            assert y.item() == n * i + n * (n - 1) // 2


def check_random_sequence(rank, n, group, length=300, seed=0):
    """Operations in random order and sizes, with ranks that dawdle.

    Steps of different kinds must not run into each other, whoever writes and however far ahead a rank is.
    """
    same_for_all, own = random.Random(seed), random.Random(seed * 100 + rank)
    for i in range(length):
        name = same_for_all.choice(
            [
                "all_reduce",
                "reduce",
                "broadcast",
                "gather",
                "scatter",
                "all_gather",
                "reduce_scatter",
                "all_to_all",
                "barrier",
            ]
        )
        numel = same_for_all.choice([0, 1, 63, 2000, 2000, 40_000, 300_000])
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
    for scale in (
        0,
        1,
        40_000,
    ):  # the last: streams longer than the staging buffer, from few to one destination
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


def check_objects(rank, n, group):
    thing = {"rank": rank, "text": "x" * (1000 * rank)}
    all_of_them: list = [None] * n
    dist.all_gather_object(all_of_them, thing, group=group)
    assert [o["rank"] for o in all_of_them] == list(range(n)) and len(all_of_them[-1]["text"]) == 1000 * (n - 1)
    box = [thing if rank == 1 else None, rank]
    dist.broadcast_object_list(box, group_src=1, group=group)
    assert box[0]["rank"] == 1 and box[1] == 1
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(thing, gathered, group_dst=0, group=group)
    assert rank != 0 or [o["rank"] for o in gathered] == list(range(n))
    got: list = [None]
    dist.scatter_object_list(got, all_of_them if rank == 0 else None, group_src=0, group=group)
    assert got[0]["rank"] == rank


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


def check_refusals(rank, n, group):
    """Refused before anything is sent: the group goes on working."""
    for call, says in (
        (lambda: dist.all_reduce(torch.ones(2), Op.BAND, group=group), "integer or bool"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3 * n), torch.ones(2), group=group), f"{n} times"),
        (
            lambda: dist.all_to_all_single(torch.ones(n), torch.ones(n), [1] * n, [2] * n, group=group),
            "sum to",
        ),
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
        time.sleep(0.6)
    before = time.process_time()
    dist.barrier(group=group)
    assert rank == 0 or time.process_time() - before < 0.15, time.process_time() - before


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
    x, waited = torch.zeros(1), []
    for _ in range(5):  # a busy machine may take its time now and then
        dist.barrier(group=group)
        start = time.perf_counter()
        work = dist.all_reduce(x, group=linked, async_op=True)
        assert not work.is_completed() or time.perf_counter() - start >= wire
        dist.barrier(group=group)
        time.sleep(wire)
        start = time.perf_counter()
        work.wait()
        waited.append(time.perf_counter() - start)
    assert min(waited) < wire / 2, waited
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
            for i in range(200):
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

    broken = fresh(timeout=timedelta(seconds=2))
    if rank > 0:
        text = error(lambda: dist.barrier(group=broken))
        assert "timeout of 2000 ms" in text and "rank 0" in text, text
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


CHECKS = {name.removeprefix("check_"): f for name, f in list(globals().items()) if name.startswith("check_")}


def run_checks(rank, n):
    report = {}
    group = dist.new_group(list(range(n)), backend=shm.BACKEND)
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            check(rank, n, group)
            report[name] = "ok"
        except BaseException:
            report[name] = traceback.format_exc()
            break  # the ranks are out of step now; the others get errors of their own
        report[f"{name} seconds"] = round(time.perf_counter() - start, 2)
    return report


@pytest.fixture(scope="module")
def reports():
    """n -> what each rank reported; the world is pat_shm for two ranks and gloo for four."""
    before = segments()

    @functools.cache
    def run(n):
        return run_ranks(n, run_checks, world_backend="pat_shm" if n == 2 else "gloo")

    yield run
    assert_no_segment_left(before)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", list(CHECKS))
def test_backend(reports, n, name):
    for rank, report in enumerate(reports(n)):
        assert report.get(name, "not run, see an earlier failure") == "ok", f"rank {rank}: {report.get(name, report)}"


def killed_peer(rank, n):
    """Rank 1 is killed; returns for three calls on the others how long each took to fail, and the message."""
    groups = [dist.new_group(list(range(n)), backend=shm.BACKEND) for _ in range(3)]
    x = torch.ones(100)
    for group in groups:
        dist.all_reduce(x, group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def broadcasts():  # from a rank that lives, and finds out when it needs its buffer back
        for _ in range(3):
            dist.broadcast(x, group_src=0, group=groups[1])

    failures = []
    for call in (
        lambda: dist.all_reduce(x, group=groups[0]),
        broadcasts,
        lambda: dist.recv(x, group_src=1, group=groups[2]),
    ):
        start = time.perf_counter()
        try:
            call()
        except dist.DistBackendError as e:
            failures.append((time.perf_counter() - start, str(e)))
    return failures


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_killed_peer_is_named(start):
    before = segments()
    results = run_ranks(3, killed_peer, world_backend="gloo", start=start, silent=(1,))
    for failures in (results[0], results[2]):
        assert len(failures) == 3, failures
        for seconds, text in failures:
            assert seconds < 30 and "rank 1 (global rank 1" in text and "gone" in text, failures
    assert_no_segment_left(before)


def join_a_group_that_never_fills(path):
    shm.register()
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = dist.FileStore(path, 2), 0, 2
    options.timeout, options.group_id, options.global_ranks_in_group = timedelta(seconds=60), "x", []
    shm._create(options, None)


def test_a_name_left_by_a_killed_creator_is_swept(tmp_path):
    before = segments()
    creator = multiprocessing.get_context("spawn").Process(
        target=join_a_group_that_never_fills, args=(str(tmp_path / "store"),)
    )
    creator.start()
    started = time.perf_counter()
    while not (left := {s for s in segments() - before if created_by(s, creator.pid)}):
        assert time.perf_counter() - started < 60
        time.sleep(0.02)
    creator.kill()
    creator.join()
    assert left <= segments()
    assert run_ranks(1, one_barrier) == [None]
    assert not left & segments()


def created_by(segment: str, pid: int) -> bool:
    try:
        head = (Path("/dev/shm") / segment).read_bytes()[:64]
    except FileNotFoundError:
        return False
    return struct.pack("i", pid) in head


def one_barrier(rank, n):
    dist.barrier()


@pytest.mark.parametrize("text", ["", "10", "10:", "a:b", "10:0", "-1:10", "10:inf", "nan:1", "1:2:3"])
def test_bad_links_are_refused(monkeypatch, text):
    with pytest.raises(ValueError, match="link|allowed"):
        shm.Link.parse(text)
    monkeypatch.setenv(shm.LINK_ENV, text)
    if text:
        with pytest.raises(ValueError, match="link|allowed"):
            shm.current_link()


def test_the_link_of_the_environment(monkeypatch):
    monkeypatch.setenv(shm.LINK_ENV, "10:25")
    assert shm.current_link() == shm.Link(latency_us=10, gb_per_s=25)
    monkeypatch.delenv(shm.LINK_ENV)
    assert shm.current_link() is None


def test_register_twice():
    shm.register()
    shm.register()
    assert shm.BACKEND in dist.Backend.backend_list
