"""Requests that live through switches, the clients that send them, and what must be left; no test of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sglang_pat.testing.server import Server
from sglang_pat.testing.tokenizer import EOS_ID, STOP_ID

Body = dict[str, Any]

LENGTH = 200
"""Tokens of most answers."""
STEPS = (20, 50, 80, 110)
"""Decode steps after which it switches; most requests live through all of them."""
UP_AND_DOWN = (2, 1, 2, 1)

READ_BUFFER = 1 << 20
"""aiohttp refuses lines of more than its buffer; chunks with logprobs are long."""


def prompt(seed: int, length: int = 20) -> list[int]:
    """A prompt of ordinary tokens, another one for every seed."""
    return [6 + (seed * 7919 + i * (31 + seed)) % 490 for i in range(length)]


GREEDY = {"temperature": 0, "ignore_eos": True}
NEVER_ENDS = {"ignore_eos": False, "logit_bias": {str(token): -100.0 for token in (EOS_ID, STOP_ID)}}
"""Sampling parameters of requests that may end, as SGLang sees it, but do not."""
OUTER = "rid priority return_logprob logprob_start_len top_logprobs_num token_ids_logprob".split()


def body(seed: int, tokens: int = LENGTH, **fields: Any) -> Body:
    """A greedy request; fields of ``/generate`` go to the body, all others are sampling parameters."""
    outer = {name: fields.pop(name) for name in OUTER if name in fields}
    sampling = GREEDY | {"max_new_tokens": tokens} | fields
    return {"input_ids": prompt(seed), "sampling_params": sampling} | outer


def endless(seed: int, **fields: Any) -> Body:
    """A request that does not end by itself within a test."""
    return body(seed, tokens=3500, **fields)


@dataclass
class Stream:
    """One streamed answer: all chunks, and the tokens it had at the switches it lived through."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    switched_at: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.chunks[-1]["meta_info"]["completion_tokens"] if self.chunks else 0

    @property
    def answer(self) -> dict[str, Any]:
        return self.chunks[-1]


def open_session() -> aiohttp.ClientSession:
    # A connection for each request: one that is kept may be closed by the server just when it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=1800)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BUFFER)


async def post(session: aiohttp.ClientSession, server: Server, path: str, data: Any = None) -> int:
    async with session.post(server.url + path, json=data) as response:
        await response.read()
        return response.status


def ask(server: Server, path: str, **given: Any) -> Any:
    """The server's answer, which is no refusal."""
    answer = server.post(path, given or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def read(server: Server, session: aiohttp.ClientSession, request: Body, stream: Stream) -> None:
    async for chunk in server.stream(session, request):
        assert "error" not in chunk, chunk
        stream.chunks.append(chunk)
        # Lines that are there already are read without a pause; give the other streams their turn.
        await asyncio.sleep(0)


async def switch(server: Server, session: aiohttp.ClientSession, tp: int) -> dict[str, Any]:
    code, record = await server.reconfigure_async(session, tp)
    assert code == 200, record
    assert not record.get("error")
    return record


def up_and_down(arrived: int) -> list[dict[str, int]]:
    """Switch up and down twice, once so many requests have come."""
    return [{"tp": tp, "arrived": arrived, "step": step} for tp, step in zip(UP_AND_DOWN, STEPS, strict=True)]


async def hold(server: Server, session: aiohttp.ClientSession, bodies: Sequence[Body], step: int = STEPS[0], **point):
    """Send these: tasks of requests of which each has made so many steps, and none goes on until the next schedule."""
    await server.set_schedule(session, {"arrived": len(bodies), "step": step, "hold": True} | point)
    work = [asyncio.ensure_future(server.generate_one(session, one)) for one in bodies]
    await server.wait_for_schedule(session)
    return work


def through(
    server: Server, bodies: Sequence[Body], switches: Mapping[int, int] | None = None, at: str = "step"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers to all, sent at once, and the records of the switches meanwhile.

    Args:
        switches: degree by decode step, up and down if left out; ``at="batch"``: by step of any kind.
    """

    async def run():
        async with server.session() as session:
            steps = switches or dict(zip(STEPS, UP_AND_DOWN, strict=True))
            await server.set_schedule(
                session, *({"tp": tp, "arrived": len(bodies), at: step} for step, tp in steps.items())
            )
            work = asyncio.ensure_future(server.generate_async(bodies))
            records = (await server.wait_for_schedule(session))["switches"]
            return await work, records

    answers, records = asyncio.run(run())
    assert not any(record["error"] for record in records), records
    return answers, records


def tokens(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


async def stream_across(server: Server, bodies: Sequence[Body]) -> list[Stream]:
    """Stream all bodies at once across the switches of :func:`up_and_down`."""
    streams = [Stream() for _ in bodies]
    async with open_session() as session:
        await server.set_schedule(session, *up_and_down(len(bodies)))
        await asyncio.gather(*(read(server, session, b, s) for b, s in zip(bodies, streams, strict=True)))
        state = await server.wait_for_schedule(session)
    assert [switch["error"] for switch in state["switches"]] == [""] * len(STEPS)
    for stream in streams:
        # A token from the prefill, and one from each step.
        stream.switched_at = [step + 1 for step in STEPS if step + 1 < stream.tokens]
    return streams


def check_idle(server: Server) -> None:
    """Nothing is left over: no request, no round and, after a flush, no KV token on any leader.

    SGLang's flush waits until it has ended what was aborted.
    """
    answer = server.post("/flush_cache?timeout=500")
    assert answer.status_code == 200, answer.text
    status = server.status()
    assert status["requests"] == 0 and status["rounds"]["open"] == [], status
    names = ("in_flight", "running", "waiting", "kv_used")
    left = [group for group in status["groups"] if any(group[name] for name in names)]
    assert not left, left


async def idle(server: Server) -> None:
    await asyncio.to_thread(check_idle, server)


Status = dict[str, Any]


async def wait_for_status(status: Callable[[], Status], reached: Callable[[Status], bool]) -> Status:
    """Wait for a state that lasts until the test goes on; returns the status then.

    Nobody is told of a state: this looks again and again.  The limit is pytest's.
    """
    while not reached(found := await asyncio.to_thread(status)):
        await asyncio.sleep(0.02)
    return found


def read_degrees(status: Callable[[], Status], log: Path, read: int) -> tuple[int, list[int], int]:
    """Degree in which a decision log's last round was to start; degrees of the engine while more than one of its
    requests was left; lines of the log.

    Args:
        read: lines of earlier rounds.
    """
    asyncio.run(wait_for_status(status, lambda found: not found["requests"]))  # and so all of the round is in the log
    lines = log.read_bytes().splitlines()
    decisions = [event["snapshot"] for event in map(json.loads, lines[read:]) if event["event"] == "decision"]
    full = [snapshot for snapshot in decisions if snapshot["requests"] > 1]
    return full[0]["start"], sorted({snapshot["tp"] for snapshot in full}), len(lines)


async def wait_for_layout(status: Callable[[], Status], tp: int) -> Status:
    """Wait until the engine is in degree ``tp``, where its load keeps it; returns its status then."""
    return await wait_for_status(status, lambda found: found["layout"]["tp"] == tp and not found["switching"])


def check_unharmed(server: Server) -> None:
    """The engine answers, and switches."""
    server.reconfigure(1)  # unless it is there
    assert [server.reconfigure(tp)["to_tp"] for tp in (2, 1)] == [2, 1]
    assert len(server.post("/generate", body(1, 5)).json()["output_ids"]) == 5
