"""What goes wrong in a switch: before COMMIT the old layout goes on, a dead rank ends the engine cleanly."""

from __future__ import annotations

import asyncio
import os
import time

import aiohttp
import psutil
import pytest
import requests

from sglang_pat.switch.faults import ENV
from sglang_pat.testing.server import Server

BASE = ("--tp", "1", "--dp", "2", "--adaptive-tp", "--pat-policy", "manual")
BODIES = [
    {"input_ids": [5 + i, 7, 9], "sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}}
    for i in range(4)
]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("sglang_pat", "torch_"))}


@pytest.mark.parametrize("weights", ["resident", "reshard"])
def test_failure_before_commit_leaves_the_old_layout(llama, weights):
    """Faults on one rank in switches 1, 2 and 3 (both directions); every request completes, unchanged."""
    faults = {"PREPARE": 1, "QUIESCE": 0, "EXCHANGE": 1}
    for state, rank in faults.items():
        with Server(llama, *BASE, "--pat-weights", weights, env={ENV: f"{state}:{rank}:raise:2"}) as server:
            expected = [answer["output_ids"] for answer in server.generate(BODIES)]

            async def switching(server=server, state=state, rank=rank):
                async with server.session() as session:
                    work = asyncio.ensure_future(server.generate_async(BODIES))
                    await server.until_decoding(session, 4)
                    code, _ = await server.reconfigure_async(session, 2)
                    assert code == 200
                    code, body = await server.reconfigure_async(session, 1)
                    assert code == 500 and f"rank {rank}" in body["error"]["message"], body
                    assert (await _status(session, server))["layout"] == {"tp": 2, "dp": 1}
                    code, _ = await server.reconfigure_async(session, 1)
                    assert code == 200
                    return await work

            answers = asyncio.run(switching())
            assert [answer["output_ids"] for answer in answers] == expected, state
            status = server.status()
            assert status["layout"] == {"tp": 1, "dp": 2} and status["requests"] == 0
            assert [bool(record["error"]) for record in status["switches"]] == [False, True, False]
        if weights == "reshard":
            break  # the same paths but for the weights; one state is enough


async def _status(session: aiohttp.ClientSession, server: Server) -> dict:
    async with session.get(server.url + "/pat/status") as response:
        return await response.json()


@pytest.mark.parametrize("state", ["PREPARE", "QUIESCE", "EXCHANGE", "COMMIT", "RESUME"])
def test_rank_killed_in_a_state_ends_the_engine(llama, state):
    """Within 10 s: an error to every waiting client, no process and no segment left."""
    before = shared_memory()
    server = Server(llama, *BASE, env={ENV: f"{state}:1:kill"})
    children = server.children()

    async def killing() -> tuple[list, float]:
        async with server.session() as session:
            work = [asyncio.ensure_future(server.one(session, body)) for body in BODIES]
            await server.until_decoding(session, 4)
            begin = time.monotonic()
            switch = asyncio.ensure_future(server.reconfigure_async(session, 2))
            results = await asyncio.wait_for(asyncio.gather(*work, switch, return_exceptions=True), 30)
            return results, time.monotonic() - begin

    results, seconds = asyncio.run(killing())
    assert all(isinstance(result, Exception) for result in results), results
    assert seconds < 10, f"clients waited {seconds:.1f} s for their error"
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, [process.cmdline() for process in alive]
    assert server.process.wait(timeout=10) != 0
    assert shared_memory() <= before
    server.stop()



def test_coordinator_killed_ends_the_engine(llama):
    before = shared_memory()
    server = Server(llama, *BASE)
    children = server.children()
    (coordinator,) = [p for p in children if p.cmdline() and p.cmdline()[0].startswith("sglang_pat::coordinator")]

    async def killing() -> list:
        async with server.session() as session:
            work = [asyncio.ensure_future(server.one(session, body)) for body in BODIES]
            await server.until_decoding(session, 4)
            coordinator.kill()
            return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 20)

    begin = time.monotonic()
    results = asyncio.run(killing())
    # Requests that were decoding may still have been answered before the watchdog looked.
    assert all(isinstance(result, (Exception, dict)) for result in results)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive and time.monotonic() - begin < 20
    assert shared_memory() <= before
    with pytest.raises(requests.ConnectionError):
        server.get("/health")
    server.stop()
