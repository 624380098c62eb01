"""The store in which ranks meet: it works, and listens on loopback only."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch.distributed import rendezvous as torch_rendezvous

from sglang_pat.comm import rendezvous

pytestmark = pytest.mark.unit


def test_ranks_meet_on_loopback():
    rendezvous.register()
    rendezvous.register()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def join(rank: int):
        return next(torch_rendezvous(rendezvous.url(port), rank, 2, timeout=timedelta(seconds=60)))

    with ThreadPoolExecutor(2) as pool:
        (first, *placed), (second, *others) = pool.map(join, range(2))
    assert placed == [0, 2] and others == [1, 2]
    first.set("key", "value")
    assert second.get("key") == b"value"
    connections = psutil.Process().net_connections("tcp")
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port} == {"127.0.0.1"}
