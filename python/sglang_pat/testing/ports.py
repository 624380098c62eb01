"""Free TCP ports."""

from __future__ import annotations

import os
import random
import socket

_PORTS = [*range(20000, 22000), *range(30000, 32000)]
"""SGLang adds up to 20,000 to the port it is given, and the sum must be a port too.  Between these SGLang 0.5.23 takes
ports for its process groups, and the kernel hands out those above by itself."""

_SHARES = 8


def _share() -> list[int]:
    """This process's: that of a pytest worker beside others, for a server listens seconds after its port was chosen."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return _PORTS[number % _SHARES :: _SHARES]


def find_free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    for port in random.SystemRandom().sample(_share(), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free TCP port found between {_PORTS[0]} and {_PORTS[-1]}")
