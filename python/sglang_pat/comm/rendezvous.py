"""Where the ranks of a node find one another: a store that listens on loopback only.

torch's own ``tcp://`` store listens on all interfaces, whatever address it is given::

    rendezvous.register()
    dist.init_process_group(init_method=rendezvous.url(port), rank=..., world_size=...)
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

SCHEME = "patloop"
HOST = "127.0.0.1"

_registered = False


def register() -> None:
    """Make :func:`url` known to ``torch.distributed``; again is harmless."""
    global _registered
    if not _registered:
        dist.register_rendezvous_handler(SCHEME, _meet)
        _registered = True


def url(port: int) -> str:
    """The ``init_method`` of a world whose rank 0 listens on ``port``."""
    return f"{SCHEME}://{HOST}:{port}"


def _meet(url: str, timeout: timedelta = default_pg_timeout, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    parsed = urlparse(url)
    query = parse_qs(parsed.query)
    rank, size = int(query["rank"][0]), int(query["world_size"][0])
    port, listening = parsed.port, None
    assert port is not None, "of url()"
    if rank == 0:
        server = socket.create_server((HOST, port), backlog=size + 16)
        # The store closes it.
        listening = server.detach()
    yield (
        dist.TCPStore(HOST, port, size, rank == 0, timeout, multi_tenant=True, master_listen_fd=listening),
        rank,
        size,
    )
    raise RuntimeError("ranks that were lost cannot come back")
