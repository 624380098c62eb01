"""Rounds on several servers, some of which may die (:class:`FleetBackend`).

A server is *lost* when its connections break, or when it does not answer any more.  Its samples go on elsewhere, from
the tokens that it had sent.  When a server answers again at its address, it gets samples again, if it has the same
weights as the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from sglang_pat.messages import BeginRound
from sglang_pat.rollout.http import EngineLost, HttpBackend, Weights
from sglang_pat.rollout.records import Output
from sglang_pat.rollout.requests import (
    FIRST_LIVES,
    LIVES,
    decode_tokens,
    extend_prompt,
    find_whole_only,
    leave_room,
)

logger = logging.getLogger(__name__)

PART_TOKENS = 2048
"""Tokens after which a server sends what it has of a response: so many are generated again if it is lost."""
LOOK_SECONDS = 5.0
"""Seconds between two looks whether a server that was lost answers again."""
MARGIN = 16
"""Samples that the server of a prompt may have more than the one with the fewest."""


@dataclass
class Losses:
    """Sums over a client's rounds: servers that were lost, samples that they had, tokens of these that were kept."""

    servers: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass
class _Server:
    """A server: ``samples`` that it has; ``backend``: None while it is lost; ``updates`` when it joined."""

    url: str
    backend: HttpBackend | None = None
    samples: int = 0
    updates: int = 0


class FleetBackend:
    """:class:`~.requests.Backend` over several servers, for one round.

    Args:
        connect: makes the backend of a server, from its address.
        tokenizer: see :class:`~.client.RolloutClient`.
        losses: where what is lost is added.
    """

    def __init__(
        self, urls: Sequence[str], connect: Callable[[str], HttpBackend], tokenizer: Any, losses: Losses
    ) -> None:
        self._servers, self._losses = [_Server(url) for url in urls], losses
        self._connect, self.tokenizer = connect, tokenizer
        self._homes: dict[str, _Server] = {}
        """Server of each prompt, which has its KV."""
        self._at: dict[str, HttpBackend | None] = {}
        """Backend that has a sample; None: it is about to go elsewhere.  ``_stopped``: samples that are not to."""
        self._stopped: set[str] = set()
        self._begun = BeginRound()
        self._weights: Weights | None = None
        self._updates = 0
        self._looking: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        """Ends of lost backends."""
        self._why: dict[str, str] = {}
        """What was wrong with each server that was lost."""

    async def begin_round(self, begun: BeginRound) -> None:
        """Tell all servers of the round; those that have other weights than most updates have brought are left out.

        Raises:
            ConnectionError: none can be reached; one line.
            ValueError: a server refuses it.
        """
        self._begun = replace(begun, requests=None, prompts=None)  # nobody knows how many each will get
        answers = await asyncio.gather(*map(self._begin_round, self._servers), return_exceptions=True)
        for refusal in filter(None, answers):  # not before all have answered: the end is told to those that take it
            raise refusal
        backends = [backend for _, backend in self._list_living()]
        self._weights = max((backend.weights for backend in backends), key=lambda weights: weights.updates)
        for server in self._servers:
            await self._leave_out_if_other(server)
        self._looking = asyncio.ensure_future(self._look_for_lost())

    async def end_round(self, name: str) -> None:
        if self._looking is not None:
            self._looking.cancel()  # one that answers now would be told that a round begins that is over
        for server in self._servers:
            if server.backend is not None:
                try:
                    await server.backend.end_round(name)
                except ConnectionError as error:
                    self._lose(server, server.backend, error)

    def count_updates(self) -> int:
        return self._updates + sum(
            server.backend.count_updates() - server.updates for server in self._servers if server.backend is not None
        )

    def get_token_limit(self) -> int:
        return min(backend.get_token_limit() for _, backend in self._list_living())

    async def generate(self, rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        """See :meth:`~.requests.Backend.generate`.

        Raises:
            ValueError: a server refuses it; its own line.
            ConnectionError: no server is left, or server after server is lost with this sample.
        """
        output, lost, at_once = Output(), 0, 0
        goes_on = "input_ids" in prompt and not find_whole_only(params)
        try:
            while rid not in self._stopped:
                server = self._choose(rid)
                backend = self._at[rid] = server.backend
                assert backend is not None
                server.samples += 1
                count = len(output.token_ids)
                try:
                    more = await backend.generate(
                        rid,
                        extend_prompt(prompt, output if count else None),
                        leave_room(params, count) if count else params,
                    )
                    output = output.concatenate(more)
                    break
                except EngineLost as error:
                    self._at[rid] = None
                    self._lose(server, backend, error)
                    lost, at_once = lost + error.had, at_once + (error.had and not error.output.token_ids)
                    self._losses.samples += 1
                    if goes_on:
                        self._losses.tokens += len(error.output.token_ids)
                        output = output.concatenate(error.output)
                    if output.finish_reason:
                        break  # its last token was there, and the end was not said
                    if lost == LIVES or at_once == FIRST_LIVES:
                        raise ConnectionError(
                            f"{lost} servers were lost while they had sample {rid}, {at_once} of them before its first "
                            f"token: it is not tried on another one; {self._list_lost()}"
                        ) from None
                finally:
                    server.samples -= 1
        finally:
            self._at.pop(rid, None)
            self._stopped.discard(rid)
        if lost and output.text:
            output.text = decode_tokens(self.tokenizer, output.token_ids)
        return output

    def abort(self, rid: str) -> None:
        if (backend := self._at.get(rid)) is not None:
            backend.abort(rid)
        elif rid in self._at:
            self._stopped.add(rid)

    async def close(self) -> None:
        """End all tasks of the backend."""
        if self._looking is not None:
            self._looking.cancel()
        ends = [server.backend.close() for server in self._servers if server.backend is not None]
        await asyncio.gather(*ends, *self._closing)

    # -- inside ----------------------------------------------------------------------------------------

    def _choose(self, rid: str) -> _Server:
        """The server with the fewest samples; that of the prompt, if it has no more than a group more.

        Raises ConnectionError: none is left.
        """
        prompt = rid.rsplit("-", 2)[0]
        best = min((server for server, _ in self._list_living()), key=lambda server: server.samples)
        home = self._homes.get(prompt)
        if home is None or home.backend is None or home.samples > best.samples + MARGIN:
            home = self._homes[prompt] = best
        return home

    async def _begin_round(self, server: _Server) -> None:
        backend = self._connect(server.url)
        try:
            await backend.begin_round(self._begun)
        except ConnectionError as error:
            self._why[server.url] = str(error)
            await backend.close()
        else:
            server.backend, server.updates = backend, backend.count_updates()

    async def _leave_out_if_other(self, server: _Server) -> None:
        backend, weights = server.backend, self._weights
        if backend is None or weights is None or backend.weights.are(weights):
            return
        why = f"it has {backend.weights}, others have {weights}: send it the weights, with their weight_version"
        if self._why.get(server.url) != why:
            logger.warning("%s gets no samples of this round: %s", server.url, why)
        self._why[server.url] = why
        server.backend = None
        await backend.close()

    def _lose(self, server: _Server, backend: HttpBackend, error: ConnectionError) -> None:
        if server.backend is not backend:
            return  # another sample has told
        logger.warning("%s is lost, its samples go on elsewhere: %s", server.url, error)
        self._why[server.url] = str(error)
        self._updates += backend.count_updates() - server.updates
        self._losses.servers += 1
        server.backend = None
        backend.lose(error)
        end = asyncio.ensure_future(backend.close())
        self._closing.add(end)
        end.add_done_callback(self._closing.discard)

    def _list_living(self) -> list[tuple[_Server, HttpBackend]]:
        """The servers that are not lost.  Raises ConnectionError: none is left."""
        living = [(server, server.backend) for server in self._servers if server.backend is not None]
        if not living:
            raise ConnectionError(f"no server is left; {self._list_lost()}")
        return living

    def _list_lost(self) -> str:
        return "; ".join(self._why[server.url] for server in self._servers if server.backend is None)

    async def _look_for_lost(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for server in self._servers:
                if server.backend is None:
                    try:
                        await self._begin_round(server)
                        await self._leave_out_if_other(server)
                    except ValueError as error:  # it is another one, or not ready
                        self._why[server.url] = str(error)
                    if server.backend is not None:
                        logger.warning("%s answers again, and gets samples", server.url)
