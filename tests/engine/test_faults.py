"""What goes wrong in a switch: before COMMIT the old layout goes on, a dead rank ends the engine cleanly.

Servers are those that the other tests have left, as each is dead afterwards.
"""

from __future__ import annotations

import asyncio
import os
import time

import psutil
import pytest
import requests

from sglang_pat.launch.processes import wait_until_ended
from sglang_pat.testing.server import Server

from .conftest import fault

BODIES = [
    {"input_ids": [5 + i, 7, 9], "sampling_params": {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}}
    for i in range(4)
]
HELD = {"arrived": len(BODIES), "step": 20, "hold": True}
"""All of them decode, and none goes on."""


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("sglang_pat", "torch_"))}


@pytest.mark.parametrize("weights", ["resident", "reshard"])
def test_failure_before_commit_leaves_the_old_layout(servers, llama, marker, weights):
    """Each fault in the second of three switches; every request completes, unchanged."""
    if weights == "resident":
        server = servers.adaptive(llama)
    else:
        server = servers.adaptive(marker(100), 2, "--pat-weights", "reshard")
    expected = [answer["output_ids"] for answer in server.generate(BODIES)]

    async def switching(state: str, rank: int) -> list[dict]:
        async with server.session() as session:
            await server.arm(session, HELD)
            work = asyncio.ensure_future(server.generate_async(BODIES))
            await server.reached(session)
            assert (await server.reconfigure_async(session, 2))[0] == 200
            with fault(server, f"{state}:{rank}:raise"):
                code, body = await server.reconfigure_async(session, 1)
            assert code == 500 and f"rank {rank}" in body["error"]["message"], body
            assert server.status()["layout"] == {"tp": 2, "dp": 1}
            # It goes on where it was; after a lost exchange with a prefill.
            await server.arm(session, {"batch": 10, "hold": True})
            await server.reached(session)
            assert (await server.reconfigure_async(session, 1))[0] == 200
            await server.arm(session)
            return await work

    for state, rank in {"PREPARE": 1, "QUIESCE": 0, "EXCHANGE": 1}.items():
        answers = asyncio.run(switching(state, rank))
        assert [answer["output_ids"] for answer in answers] == expected, state
        status = server.status()
        assert status["layout"] == {"tp": 1, "dp": 2}
        assert [bool(record["error"]) for record in status["switches"][-3:]] == [False, True, False]


def test_a_control_request_that_does_not_get_its_layout_is_answered_and_all_goes_on(servers, llama):
    """Three attempts, then an error; a second attempt that succeeds has moved no KV.  Requests end unchanged."""
    server = servers.adaptive(llama)
    expected = [answer["output_ids"] for answer in server.generate(BODIES)]
    asked = {"name": "model.norm.weight", "truncate_size": 2}

    async def asking() -> tuple[list[dict], list[int]]:
        async with server.session() as session:
            await server.arm(session, HELD)
            work = asyncio.ensure_future(server.generate_async(BODIES))
            await server.reached(session)
            codes = []
            for failing in (True, False):
                assert (await server.reconfigure_async(session, 2))[0] == 200
                epoch = server.status()["switches"][-1]["epoch"]
                with fault(server, "PREPARE:1:raise" if failing else f"PREPARE:1:raise:{epoch + 1}"):
                    async with session.post(f"{server.url}/get_weights_by_name", json=asked) as response:
                        codes.append(response.status)
                assert server.status()["layout"]["tp"] == (2 if failing else 1)
                if failing:
                    assert (await server.reconfigure_async(session, 1))[0] == 200
            await server.arm(session)
            return await work, codes

    answers, codes = asyncio.run(asking())
    assert codes == [400, 200]
    assert [answer["output_ids"] for answer in answers] == expected
    found = [(r["to_tp"], bool(r["error"]), r["reason"]) for r in server.status()["switches"][-7:]]
    lost, home = (1, True, "control"), (1, False, "control")
    assert found == [lost, lost, lost, (1, False, "request"), (2, False, "request"), lost, home]
    last = server.status()["switches"][-1]
    assert (last["migrated"], last["recomputed"], last["moved_bytes"]) == (0, len(BODIES), 0)


def gone(server: Server, children: list[psutil.Process]) -> None:
    """No process and no segment of the engine is left, and the exit code says that it failed."""
    alive = wait_until_ended(children, 500)
    assert not alive, [process.cmdline() for process in alive]
    assert server.process.wait(timeout=500) != 0
    with pytest.raises(requests.ConnectionError):
        server.get("/health")


@pytest.mark.parametrize("state", ["PREPARE", "QUIESCE", "EXCHANGE", "COMMIT", "RESUME"])
def test_rank_killed_in_a_state_ends_the_engine(servers, llama, state):
    """An error to every waiting client."""
    server = servers.victim(llama)
    children = server.children()
    mine = segments(server)

    async def killing() -> list:
        async with server.session() as session:
            await server.arm(session, HELD)
            work = [asyncio.ensure_future(server.one(session, body)) for body in BODIES]
            await server.reached(session)
            with fault(server, f"{state}:1:kill"):
                begin = time.monotonic()
                results = await asyncio.gather(*work, server.reconfigure_async(session, 2), return_exceptions=True)
            print(f"clients waited {time.monotonic() - begin:.1f} s for their error")
            return results

    results = asyncio.run(killing())
    assert all(isinstance(result, Exception) for result in results), results
    gone(server, children)
    assert not mine & shared_memory()
    server.stop()


def segments(server: Server) -> set[str]:
    """Shared memory that the processes of ``server`` have mapped."""
    mapped = set()
    for process in server.children():
        try:
            mapped |= {os.path.basename(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
        except psutil.Error:
            continue
    return mapped


def test_coordinator_killed_ends_the_engine(servers, llama):
    server = servers.victim(llama)
    children, mine = server.children(), segments(server)
    (coordinator,) = [p for p in children if p.cmdline() and p.cmdline()[0].startswith("sglang_pat::coordinator")]

    async def killing() -> list:
        async with server.session() as session:
            await server.arm(session, HELD)
            work = [asyncio.ensure_future(server.one(session, body)) for body in BODIES]
            await server.reached(session)
            coordinator.kill()
            return await asyncio.gather(*work, return_exceptions=True)

    # They hold: none can be answered.
    assert all(isinstance(result, Exception) for result in asyncio.run(killing()))
    gone(server, children)
    assert not mine & shared_memory()
    server.stop()
