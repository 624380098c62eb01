"""Requests that live through switches, and the clients that send them; no test of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sglang_pat.testing.server import Server

Body = dict[str, Any]

LENGTH = 320
"""Tokens of most answers."""
STEPS = (20, 75, 130, 185)
"""Decode steps after which it switches; most requests live through all of them."""
UP_AND_DOWN = (2, 1, 2, 1)

READ_BUFFER = 1 << 20
"""aiohttp refuses lines of more than its buffer; chunks with logprobs are long."""


def prompt(seed: int, length: int = 20) -> list[int]:
    """A prompt of ordinary tokens, another one for every seed."""
    return [6 + (seed * 7919 + i * (31 + seed)) % 490 for i in range(length)]


def body(seed: int, tokens: int = LENGTH, **fields: Any) -> Body:
    """A greedy request; fields of ``/generate`` go to the body, all others are sampling parameters."""
    outer = {
        name: fields.pop(name)
        for name in ("rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob")
        if name in fields
    }
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | fields
    return {"input_ids": prompt(seed), "sampling_params": sampling} | outer


def endless(seed: int, **fields: Any) -> Body:
    """A request that does not end by itself within a test."""
    return body(seed, tokens=3500, **fields)


@dataclass
class Stream:
    """One streamed answer: all chunks, and the tokens it had at the switches it lived through."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    switched_at: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def tokens(self) -> int:
        return self.chunks[-1]["meta_info"]["completion_tokens"] if self.chunks else 0

    @property
    def answer(self) -> dict[str, Any]:
        return self.chunks[-1]


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=300),
        read_bufsize=READ_BUFFER,
    )


async def post(session: aiohttp.ClientSession, server: Server, path: str, data: Any = None) -> int:
    async with session.post(server.url + path, json=data) as response:
        await response.read()
        return response.status


async def read(server: Server, session: aiohttp.ClientSession, request: Body, stream: Stream) -> None:
    try:
        async for chunk in server.stream(session, request):
            assert "error" not in chunk, chunk
            stream.chunks.append(chunk)
            # Lines that are there already are read without a pause; give the other streams their turn.
            await asyncio.sleep(0)
    finally:
        stream.done = True


async def switch(server: Server, session: aiohttp.ClientSession, tp: int) -> dict[str, Any]:
    code, record = await server.reconfigure_async(session, tp)
    assert code == 200, record
    assert not record.get("error")
    return record


def up_and_down(arrived: int) -> list[dict[str, int]]:
    """Up and down twice, once so many requests have come."""
    return [{"tp": tp, "arrived": arrived, "step": step} for tp, step in zip(UP_AND_DOWN, STEPS, strict=True)]


def held(arrived: int, step: int = STEPS[0]) -> dict[str, Any]:
    """After so many requests have come and made so many steps nothing goes on until the next schedule."""
    return {"arrived": arrived, "step": step, "hold": True}


async def stream_across(server: Server, bodies: Sequence[Body]) -> list[Stream]:
    """Stream all bodies at once across the switches of :func:`up_and_down`."""
    streams = [Stream() for _ in bodies]
    async with open_session() as session:
        await server.arm(session, *up_and_down(len(bodies)))
        await asyncio.gather(*(read(server, session, b, s) for b, s in zip(bodies, streams, strict=True)))
        state = await server.reached(session)
    assert [switch["error"] for switch in state["switches"]] == [""] * len(STEPS)
    for stream in streams:
        # A token from the prefill, and one from each step.
        stream.switched_at = [step + 1 for step in STEPS if step + 1 < stream.tokens]
    return streams


async def idle(server: Server, session: aiohttp.ClientSession) -> None:
    """Wait until the engine has no request left: SGLang's flush does."""
    assert await post(session, server, "/flush_cache?timeout=500") == 200
    assert server.status()["requests"] == 0
