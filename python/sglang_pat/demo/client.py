"""The client: sends the chat prompts, notes when each token comes in and where each request went."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import aiohttp

from sglang_pat.demo.display import Display
from sglang_pat.demo.progress import Progress, Row
from sglang_pat.demo.records import Answer, DemoError
from sglang_pat.demo.routes import Routes, loads
from sglang_pat.demo.tasks import Task
from sglang_pat.testing.server import Server, sent_event

ROUTE_SECONDS = 0.1
"""Longest wait for the engine to count a request before the next one is sent."""

POLL_SECONDS = 0.5
"""How often the progress display asks for the engine's status."""

SILENCE_SECONDS = 120.0
"""The engine counts as stuck if no token came in for so long."""


async def run_tasks(server: Server, tasks: list[Task], display: Display, title: str) -> tuple[float, list[Answer]]:
    """Send everything, wait for everything; returns the unix time of the first send, and the answers.

    Raises:
        DemoError: an answer is missing or wrong, or the engine got stuck.
        aiohttp.ClientError: the server is gone.
    """
    progress = Progress(title, [task.prompt for task in tasks])
    with display.following(progress):
        async with server.session() as session:
            watcher = asyncio.create_task(_watch(server, session, progress))
            try:
                answers = await _send_all(server, session, tasks, progress)
            finally:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
    return progress.began, answers


async def _send_all(server: Server, session: aiohttp.ClientSession, tasks: list[Task], progress: Progress):
    """Requests go out in order, the next when the engine has given the one before to a group."""
    streams: list[asyncio.Task] = []
    routes = Routes(loads(await _status(server, session)))
    progress.began = progress.heard = time.time()
    try:
        for row, task in zip(progress.rows, tasks, strict=True):
            row.sent = time.time() - progress.began
            streams.append(asyncio.create_task(_stream(server, session, task, row, progress)))
            routes.sent(row)
            await _settle(server, session, routes)
        while True:
            done, running = await asyncio.wait(streams, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
            for stream in done:
                stream.result()
            if not running:
                break
            if time.time() - progress.heard > SILENCE_SECONDS:
                raise DemoError(f"the engine is stuck: no token for {SILENCE_SECONDS:.0f} s")
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return [row.answer(index) for index, row in enumerate(progress.rows)]


async def _stream(server: Server, session: aiohttp.ClientSession, task: Task, row: Row, progress: Progress) -> None:
    async with session.post(server.url + "/v1/chat/completions", json=task.body()) as response:
        if response.status != 200:
            raise DemoError(f"/v1/chat/completions answered {response.status}: {await response.text()}")
        async for line in response.content:
            chunk = sent_event(line)
            if chunk is None:
                continue
            if "error" in chunk:
                raise DemoError(f"/v1/chat/completions answered {chunk['error']}")
            for choice in chunk["choices"]:
                row.finish = choice.get("finish_reason") or row.finish
                if text := choice["delta"].get("content"):
                    row.text += text
                    row.heard(time.time() - progress.began, chunk["usage"]["completion_tokens"])
                    progress.heard = time.time()
            if not chunk["choices"] and chunk.get("usage"):
                row.ended(time.time() - progress.began, chunk["usage"]["completion_tokens"])
    if row.finish not in ("stop", "length") or not row.times:
        raise DemoError(f"the answer to {row.prompt!r} did not end properly: finish reason {row.finish!r}")


async def _status(server: Server, session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get(server.url + "/pat/status") as response:
        return await response.json()


async def _settle(server: Server, session: aiohttp.ClientSession, routes: Routes) -> None:
    """Until the engine has counted what was sent, but not for long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ROUTE_SECONDS):
            while not routes.settled:
                routes.seen(loads(await _status(server, session)))


async def _watch(server: Server, session: aiohttp.ClientSession, progress: Progress) -> None:
    """Keep the display's view of the engine fresh."""
    while True:
        progress.engine = await _status(server, session)
        await asyncio.sleep(POLL_SECONDS)
