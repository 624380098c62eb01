"""Updates while requests are alive: paused, waited for, aborted.  On two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sglang_pat.testing.server import Server

from .weight_updates import A, B, Setup, all_layouts_say, body, from_disk, layout, succeeded

ALIVE = 200
"""Tokens of a request that is alive in a test; its engine holds it at step :data:`STEP`."""
STEP = 30


@pytest.fixture(scope="module")
def two(servers, marker) -> Setup:
    return Setup(servers, marker, 2)


async def decode_while_paused(server: Server, mode: str, act: Callable[[], Any]) -> list[dict[str, Any]]:
    """Four requests decode in the tail layout, are paused, ``act`` is called, and they go on to the end."""
    bodies = [body(70 + i, ALIVE) for i in range(4)]
    async with server.session() as session:
        await server.arm(session, {"tp": 2, "arrived": 4, "step": STEP, "hold": True})
        work = asyncio.ensure_future(server.generate_async(bodies))
        await server.reached(session)
        async with session.post(server.url + "/pause_generation", json={"mode": mode}) as response:
            assert response.status == 200
        await server.arm(session)
        await asyncio.to_thread(act)
        async with session.post(server.url + "/continue_generation", json={}) as response:
            assert response.status == 200
        return await work


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_update_with_requests_alive_in_the_tail(two, mode):
    server = two.start_in(1)

    def update() -> None:
        assert server.status()["requests"] == 4
        # Requests that are paused in place hold KV.
        succeeded(from_disk(server, two.marker, B, flush_cache=mode == "retract"))
        assert layout(server) == 1
        server.reconfigure(2)

    answers = asyncio.run(decode_while_paused(server, mode, update))
    for answer in answers:
        ids = answer["output_ids"]
        assert len(ids) == ALIVE
        assert ids[0] == A and ids[-1] != A, "old weights at first, not the old ones at last"
    assert server.post("/flush_cache").status_code == 200
    all_layouts_say(server, B)


def test_update_waits_for_running_requests(two):
    """Without a pause SGLang lets running requests finish with the weights they began with."""
    server = two.start_in(1)
    bodies = [body(90 + i, ALIVE) for i in range(4)]

    async def run() -> list[dict[str, Any]]:
        async with server.session() as session:
            await server.arm(session, {"tp": 2, "arrived": 4, "step": STEP, "hold": True})
            work = asyncio.ensure_future(server.generate_async(bodies))
            await server.reached(session)
            update = asyncio.ensure_future(asyncio.to_thread(from_disk, server, two.marker, B))
            await server.arm(session)
            succeeded(await update)
            return await work

    for answer in asyncio.run(run()):
        assert set(answer["output_ids"]) == {A} and len(answer["output_ids"]) == ALIVE
    assert layout(server) == 1
    all_layouts_say(server, B)


def test_abort_all_and_update_in_the_tail(two):
    server = two.start_in(1)
    bodies = [body(90 + i, 3000) for i in range(4)]

    async def run() -> list[dict[str, Any]]:
        async with server.session() as session:
            await server.arm(session, {"tp": 2, "arrived": 4, "step": STEP})
            work = asyncio.ensure_future(server.generate_async(bodies))
            await server.reached(session)
            succeeded(await asyncio.to_thread(lambda: from_disk(server, two.marker, B, abort_all_requests=True)))
            return await work

    for answer in asyncio.run(run()):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert set(answer["output_ids"]) <= {A}
    all_layouts_say(server, B)
