"""The shared-memory backend: every operation against local values, and what happens when a rank fails.

Two and four processes are started once, side by side, and run all ``check_*`` functions; failures come back by name.
"""

from __future__ import annotations

import os
import signal
import struct
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_pat.cpu import shm

from . import shm_groups, shm_operations
from .ranks import get_context, run_ranks

pytestmark = [
    pytest.mark.unit,
    pytest.mark.slow,
    pytest.mark.xdist_group(run_ranks.__module__),  # one server that forks ranks
    pytest.mark.skipif(not shm.is_available(), reason="the extension sglang_pat._C is not built"),
]


def segments() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("sglang_pat_*")}


def assert_no_segment_left(before: set[str]) -> None:
    for _ in range(50):  # another run on this machine may have one for an instant, while it creates a group
        if not segments() - before:
            return
        time.sleep(0.1)
    raise AssertionError(f"segments left: {segments() - before}")


CHECKS = {
    name.removeprefix("check_"): check
    for module in (shm_operations, shm_groups)
    for name, check in vars(module).items()
    if name.startswith("check_")
}


WORLDS = {2: "pat_shm", 4: "gloo"}


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
    """n -> what each rank reported.  Much of the time is waiting."""
    before = segments()
    with ThreadPoolExecutor() as pool:
        running = {n: pool.submit(run_ranks, n, run_checks, world_backend=backend) for n, backend in WORLDS.items()}
    yield {n: future.result() for n, future in running.items()}
    assert_no_segment_left(before)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("name", list(CHECKS))
def test_backend(reports, n, name):
    for rank, report in enumerate(reports[n]):
        assert report.get(name, "not run, see an earlier failure") == "ok", f"rank {rank}: {report.get(name, report)}"


def kill_peer(rank, n):
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


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_peer_is_named(reaped):
    before = segments()
    results = run_ranks(3, kill_peer, world_backend="gloo", reaped=reaped, silent=(1,))
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
    creator = get_context().Process(target=join_a_group_that_never_fills, args=(str(tmp_path / "store"),))
    creator.start()
    started = time.perf_counter()
    while not (left := {s for s in segments() - before if is_created_by(s, creator.pid)}):
        assert time.perf_counter() - started < 60
        time.sleep(0.02)
    creator.kill()
    creator.join()  # and leaves it, unless another run on this machine sweeps it first
    assert run_ranks(1, pass_barrier) == [None]
    assert not left & segments()


def is_created_by(segment: str, pid: int) -> bool:
    try:
        head = (Path("/dev/shm") / segment).read_bytes()[:64]
    except FileNotFoundError:
        return False
    return struct.pack("i", pid) in head


def pass_barrier(rank, n):
    dist.barrier()


@pytest.mark.parametrize("text", ["", "10", "10:", "a:b", "10:0", "-1:10", "10:inf", "nan:1", "1:2:3"])
def test_bad_links_are_refused(monkeypatch, text):
    with pytest.raises(ValueError, match="link|allowed"):
        shm.Link.parse(text)
    monkeypatch.setenv(shm.LINK_ENV, text)
    if text:
        with pytest.raises(ValueError, match="link|allowed"):
            shm.get_current_link()
