"""Processes that form a torch.distributed world, each running one function of a test."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang_pat.cpu import shm


@contextmanager
def emulated_link(latency_us: float, gb_per_s: float):
    """Groups created inside have it."""
    os.environ[shm.LINK_ENV] = f"{latency_us}:{gb_per_s}"
    try:
        yield
    finally:
        del os.environ[shm.LINK_ENV]


def _child(target, rank, n, meeting, world_backend, pipe, args):
    warnings.simplefilter("ignore", FutureWarning)  # torch renames functions; SGLang uses the old names
    torch.set_num_threads(1)
    shm.register()
    dist.init_process_group(
        world_backend,
        init_method=f"file://{meeting}",  # a port might be taken by somebody else before they listen
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=60),
    )
    try:
        pipe.send(target(rank, n, *args))
    except BaseException:
        pipe.send({"rank failed": traceback.format_exc()})
    finally:
        pipe.close()


def get_context():
    """Processes of it are forked from a server that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "sglang_pat.cpu.shm", "pytest"])
    return context


def run_ranks(n, target, *args, world_backend="pat_shm", reaped=True, silent=()):
    """What ``target(rank, n, *args)`` returned on each rank; None for ranks in ``silent`` (they are killed).

    The server that the ranks are forked from looks after them at once when they end.  With ``reaped=False`` they are
    children of a process that does not, so a killed one stays a zombie until the end.
    """
    context = get_context()
    if reaped:
        return _run(context, n, target, args, world_backend, silent)
    mine, theirs = context.Pipe(duplex=False)
    parent = context.Process(target=_parent, args=(theirs, n, target, args, world_backend, silent))
    parent.start()
    theirs.close()
    try:
        assert mine.poll(200), "the parent of the ranks has not answered"
        return mine.recv()
    finally:
        parent.join(10)


def _parent(pipe, *args):
    pipe.send(_run(multiprocessing.get_context("fork"), *args))


def _run(context, n, target, args, world_backend, silent):
    folder = tempfile.TemporaryDirectory()
    pipes, processes = [], []
    for rank in range(n):
        mine, theirs = context.Pipe(duplex=False)
        p = context.Process(target=_child, args=(target, rank, n, f"{folder.name}/store", world_backend, theirs, args))
        p.start()
        theirs.close()
        pipes.append(mine)
        processes.append(p)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            if rank in silent:
                results.append(None)
                continue
            assert pipe.poll(100), f"rank {rank} has not answered"
            results.append(pipe.recv())
        return results
    finally:
        for p in processes:
            p.join(10)
            if p.is_alive():
                p.kill()
                p.join()
        folder.cleanup()
