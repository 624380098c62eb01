"""A server as a round in this process sees it: ``bench/tail_rounds.py`` gives each sample its length, which
``/pat/rollout`` cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp

from sglang_pat.rollout.records import Output, SampleId
from sglang_pat.testing.server import Server

Lengths = Callable[[SampleId], int]


class Client:
    """:class:`sglang_pat.rollout.backend.Backend` over HTTP, for samples of one turn.

    Args:
        lengths: of each sample; None: they end by themselves.  Policies are told the limit only.
    """

    def __init__(self, server: Server, session: aiohttp.ClientSession, lengths: Lengths | None) -> None:
        self._server, self._session, self._lengths = server, session, lengths
        self._aborts: set[asyncio.Task] = set()

    def updates(self) -> int:
        return 0

    async def generate(self, rid: str, prompt: dict[str, Any], params: dict[str, Any]) -> Output:
        if self._lengths is not None:
            length = self._lengths(SampleId(*map(int, rid.split("-")[-4:])))
            limit = {"pat_limit": params["max_new_tokens"]}
            params = params | {"max_new_tokens": length, "ignore_eos": True, "custom_params": limit}
        body = prompt | {"rid": _ours(rid), "sampling_params": params, "return_logprob": True}
        answer = await self._server.one(self._session, body)
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        return Output(
            token_ids=answer["output_ids"], logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
            text=answer["text"], finish_reason="" if reason == "abort" else reason,
        )  # fmt: skip

    def abort(self, rid: str) -> None:
        task = asyncio.ensure_future(self._abort(_ours(rid)))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        # The session may close meanwhile: the request was out without it.  Else the round sends it again.
        with suppress(aiohttp.ClientError):
            async with self._session.post(self._server.url + "/abort_request", json={"rid": rid}):
                pass

    def text(self, token_ids: list[int]) -> str:
        raise AssertionError("samples of strict come in one piece")

    def room(self) -> int:
        raise AssertionError("samples have one turn")


def _ours(rid: str) -> str:
    # The names of a round are the server's own; it refuses them from a client.  SGLang aborts whatever begins with an
    # id, so that one must not begin another.
    return f"bench-{rid}."
