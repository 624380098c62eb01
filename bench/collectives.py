"""Collectives on CPU tensors: gloo against the shared-memory backend ``pat_shm``, in one run, taking turns.

    python bench/collectives.py [--quick] [--json FILE]

Each figure is the median over repeats of the mean time of one call on rank 0, one thread a rank. Sizes are
bytes of the tensor that a rank passes in. The backends take turns, so both see the same machine.
"""

from __future__ import annotations

import socket
import statistics
import time
from datetime import timedelta

import _bench
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_pat.cpu import shm

CASES = [
    ("all_reduce", 4 << 10),
    ("all_reduce", 64 << 10),
    ("all_reduce", 1 << 20),
    ("broadcast", 1 << 10),
    ("barrier", 0),
    ("all_to_all", 1 << 20),
]


def call(name: str, size: int, group):
    """A function that makes one call of the collective."""
    x = torch.zeros(size // 4)
    if name == "all_reduce":
        return lambda: dist.all_reduce(x, group=group)
    if name == "broadcast":
        return lambda: dist.broadcast(x, 0, group=group)
    if name == "barrier":
        return lambda: dist.barrier(group=group)
    out = torch.empty_like(x)
    return lambda: dist.all_to_all_single(out, x, group=group)


def seconds_per_call(function, calls: int, meet) -> float:
    dist.barrier(group=meet)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def measure(rank: int, ranks: int, port: int, repeats: int, block_s: float, pipe) -> None:
    torch.set_num_threads(1)
    shm.register()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    groups = {"gloo": dist.group.WORLD, shm.BACKEND: dist.new_group(list(range(ranks)), backend=shm.BACKEND)}
    meet = groups[shm.BACKEND]
    rows = []
    for name, size in CASES:
        functions = {b: call(name, size, g) for b, g in groups.items()}
        calls = {}
        for backend, function in functions.items():
            seconds_per_call(function, 3, meet)
            once = torch.tensor([seconds_per_call(function, 5, meet)])
            dist.broadcast(once, 0, group=meet)  # all ranks must make the same number of calls
            calls[backend] = max(3, min(2000, int(block_s / once.item())))
        times = {b: [] for b in functions}
        for _ in range(repeats):
            for backend, function in functions.items():
                times[backend].append(seconds_per_call(function, calls[backend], meet))
        us = {b: statistics.median(t) * 1e6 for b, t in times.items()}
        rows.append(
            {
                "ranks": ranks,
                "operation": name,
                "bytes": size,
                "gloo_us": us["gloo"],
                "pat_shm_us": us[shm.BACKEND],
                "ratio": us["gloo"] / us[shm.BACKEND],
                "gloo_all_us": [t * 1e6 for t in times["gloo"]],
                "pat_shm_all_us": [t * 1e6 for t in times[shm.BACKEND]],
            }
        )
    if rank == 0:
        pipe.send(rows)
    dist.barrier(group=meet)
    dist.destroy_process_group()


def run(ranks: int, repeats: int, block_s: float) -> list[dict]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    receiver, sender = mp.get_context("spawn").Pipe(duplex=False)
    context = mp.spawn(measure, (ranks, port, repeats, block_s, sender), nprocs=ranks, join=False)
    sender.close()
    while not context.join(timeout=1):  # raises if a rank fails
        if receiver.poll():
            break
    rows = receiver.recv()
    while not context.join():
        pass
    return rows


def size_text(size: int) -> str:
    return "-" if size == 0 else f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def main() -> None:
    parser = _bench.options(__doc__, "fewer and shorter repeats; under a minute or two")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="group sizes (default: 2 4)")
    args = parser.parse_args()
    repeats, block_s = (5, 0.1) if args.quick else (15, 0.3)

    machine = _bench.about(emulated_link=str(shm.get_current_link() or "none"))
    print(f"{'ranks':>5}  {'operation':<11}{'size':>7}{'gloo us':>12}{'pat_shm us':>12}{'ratio':>9}")
    results = []
    for ranks in args.ranks:
        for row in run(ranks, repeats, block_s):
            results.append(row)
            print(
                f"{ranks:>5}  {row['operation']:<11}{size_text(row['bytes']):>7}{row['gloo_us']:>12.1f}"
                f"{row['pat_shm_us']:>12.1f}{row['ratio']:>8.1f}x"
            )
    _bench.write(args.json, machine=machine, repeats=repeats, results=results)


if __name__ == "__main__":
    main()
