"""The meeting point of a node's ranks: a store that listens on loopback only.

torch's own ``tcp://`` store listens on all interfaces, whatever address it is given.  And its port has to be chosen
seconds before rank 0 listens there, while other programs choose theirs::

    rendezvous.register()
    dist.init_process_group(init_method=rendezvous.url_in(folder), rank=..., world_size=...)
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlparse

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from sglang_pat import files

SCHEME = "patloop"
HOST = "127.0.0.1"
FILE = "store"
POLL_SECONDS = 0.01


@cache
def register() -> None:
    """Make :func:`make_url` known to ``torch.distributed``; again is harmless."""
    dist.register_rendezvous_handler(SCHEME, _meet)


def make_url(port: int) -> str:
    """The ``init_method`` of a world whose rank 0 listens on ``port``."""
    return f"{SCHEME}://{HOST}:{port}"


def make_file_url(folder: Path) -> str:
    """The ``init_method`` of a world whose rank 0 listens on any free port, which it writes into ``folder``."""
    return f"{SCHEME}://{HOST}{quote(str(folder / FILE))}"


def _meet(url: str, timeout: timedelta = default_pg_timeout, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    parsed = urlparse(url)
    query = parse_qs(parsed.query)
    rank, size = int(query["rank"][0]), int(query["world_size"][0])
    port, file, listening = parsed.port, Path(unquote(parsed.path)), None
    if rank == 0:
        server = socket.create_server((HOST, port or 0), backlog=size + 16)
        if port is None:
            port = server.getsockname()[1]
            files.write(str(port).encode(), file)
        # The store closes it.
        listening = server.detach()
    elif port is None:
        port = _read_port(file, timeout)
    yield (
        dist.TCPStore(HOST, port, size, rank == 0, timeout, multi_tenant=True, master_listen_fd=listening),
        rank,
        size,
    )
    raise RuntimeError("ranks that were lost cannot come back")


def _read_port(file: Path, timeout: timedelta) -> int:
    """Port that rank 0 has written.  Raises TimeoutError: it has not."""
    end = time.monotonic() + timeout.total_seconds()
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank 0 has opened no store for {timeout.total_seconds():.0f} s")
        time.sleep(POLL_SECONDS)
    return int(file.read_text())
