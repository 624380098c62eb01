"""The store in which ranks meet: it works, and listens on loopback only."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch.distributed import rendezvous as torch_rendezvous

from sglang_pat.cpu import rendezvous

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("given", ["a port", "a folder"])
def test_ranks_meet_on_loopback(given, tmp_path):
    rendezvous.register()
    rendezvous.register()
    if given == "a port":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        place = rendezvous.make_url(port)
    else:
        (folder := tmp_path / "a folder? with 100%").mkdir()
        place = rendezvous.make_file_url(folder)

    def join(rank: int):
        return next(torch_rendezvous(place, rank, 2, timeout=timedelta(seconds=60)))

    with ThreadPoolExecutor(2) as pool:
        (first, *placed), (second, *others) = pool.map(join, range(2))
    assert placed == [0, 2] and others == [1, 2]
    if given == "a folder":
        port = int((folder / rendezvous.FILE).read_text())
    first.set("key", "value")
    assert second.get("key") == b"value"
    connections = psutil.Process().net_connections("tcp")
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port} == {"127.0.0.1"}


def test_a_rank_does_not_wait_for_ever(tmp_path):
    with pytest.raises(TimeoutError, match="rank 0 has opened no store for 0 s"):
        rendezvous._read_port(tmp_path / rendezvous.FILE, timedelta(0))
