"""Rounds on a server, or on several (:class:`RolloutClient`): the admitter is in this process, samples go over HTTP."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from sglang_pat.rollout.fleet import PART_TOKENS, FleetBackend, Losses
from sglang_pat.rollout.http import HttpBackend
from sglang_pat.rollout.loop import EngineLoop
from sglang_pat.rollout.rounds import RolloutCalls, RolloutRound

BUFFER_BYTES = 1 << 26
"""The longest line of an answer: half a million tokens."""

KEEPALIVE = {
    socket.TCP_KEEPIDLE: 4, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000,
}  # fmt: skip
"""Options with which a connection breaks ten seconds after the other machine has gone, s and ms: by default hours, if
nothing is sent.  The kernel there answers, so a server that is busy or stopped breaks none."""


def make_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for ``address`` (of ``getaddrinfo``), with :data:`KEEPALIVE`."""
    sock = socket.socket(*address[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


class RolloutClient(RolloutCalls):
    """Rounds on the server at ``url``, or on several: :meth:`rollout` and :meth:`async_rollout`, as ``Engine`` has.

    When this process ends, or its connections break, the server aborts what it had of the round.  Of several servers
    all but one may die: their samples go on elsewhere.

    Args:
        url: address of a server with ``--adaptive-tp``, e.g. ``http://localhost:30000``, or several.
        tokenizer: the model's, to decode responses that came in pieces (``partial``, several turns); None: their
            ``text`` is empty.
        api_key: of the server, the administrator's if it has both: it is needed to abort.
        name: name of this client's rounds in ``/pat/status``; training jobs that share a server need different ones.

    Attributes:
        losses: servers that were lost in the rounds so far, and what they had.
    """

    def __init__(
        self, url: str | Sequence[str], tokenizer: Any = None, api_key: str | None = None, name: str = "default"
    ) -> None:
        self.urls, self.losses = url, Losses()
        self._tokenizer, self._name, self._loop = tokenizer, name, EngineLoop()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def urls(self) -> Sequence[str]:
        """Addresses of the servers.  Others may be set at any time, and count from the next round."""
        return self._urls

    @urls.setter
    def urls(self, urls: str | Sequence[str]) -> None:
        urls = tuple(url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls))
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"urls are {urls}, must be an address, or several different ones")
        self._urls = urls

    def _watch(self, round_: RolloutRound) -> None:
        """Do nothing: each answer says how often weights had been updated."""

    def _loop_for_rounds(self) -> EngineLoop:
        return self._loop

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[HttpBackend | FleetBackend]:
        # A single server has no other to take its samples over: it may come back.
        connector = aiohttp.TCPConnector(limit=0, socket_factory=make_socket if len(self.urls) > 1 else None)
        timeout = aiohttp.ClientTimeout(total=None)
        session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, read_bufsize=BUFFER_BYTES
        )
        async with session:
            if len(self.urls) == 1:
                backend = HttpBackend(self.urls[0], session, self._tokenizer, self._name)
            else:

                def connect(url: str) -> HttpBackend:
                    return HttpBackend(url, session, self._tokenizer, self._name, PART_TOKENS)

                backend = FleetBackend(self.urls, connect, self._tokenizer, self.losses)
            try:
                yield backend
            finally:
                await backend.close()
