"""What an operator sees and does: ``/pat/status``, ``/pat/reconfigure``."""

from __future__ import annotations

import asyncio

import pytest
import requests

from sglang_pat.testing.server import Server

from .conftest import fault, held
from .controls import body, unharmed


@pytest.fixture
def server(servers, llama) -> Server:
    return servers.adaptive(llama)


# -- /pat/status --------------------------------------------------------------------------------------------


def test_status_fields(server):
    before = server.status()
    assert before["layout"] == before["base"] == {"tp": 1, "dp": 2}
    assert before["candidates"] == [{"tp": 1, "dp": 2}, {"tp": 2, "dp": 1}]
    assert before["policy"] == "schedule"
    assert before["switching"] is False and before["target"] is None
    assert before["requests"] == 0
    assert before["weight_version"] == "default"
    assert [(group["leader"], group["ranks"]) for group in before["groups"]] == [(0, [0]), (1, [1])]
    server.reconfigure(2)
    after = server.status()
    assert after["layout"] == {"tp": 2, "dp": 1} and after["base"] == {"tp": 1, "dp": 2}
    assert [(group["leader"], group["ranks"]) for group in after["groups"]] == [(0, [0, 1])]
    assert after["num_switches"] == before["num_switches"] + 1
    record = after["switches"][-1]
    assert (record["from_tp"], record["to_tp"], record["reason"], record["error"]) == (1, 2, "request", "")
    assert record["pause_seconds"] > 0 and record["started"] > 1.6e9
    assert {"prepare", "drain", "plan", "install", "check"} <= set(record["phases"])
    assert all(seconds >= 0 for seconds in record["phases"].values())


def test_status_shows_the_load_of_each_group(server):
    bodies = [body(i, 40) for i in range(6)]

    async def run():
        async with server.session() as session:
            await server.arm(session, {"arrived": 6, "step": 10, "hold": True})
            work = asyncio.ensure_future(server.generate_async(bodies))
            await server.reached(session)
            base = await asyncio.to_thread(server.status)
            expected = server.post("/pat/reconfigure", {"tp": 2, "dry_run": True}).json()
            again = await asyncio.to_thread(server.status)
            assert again | {"totals": base["totals"]} == base  # but for the time that passes
            await server.arm(session, {"tp": 2}, {"step": 1, "hold": True})
            await server.reached(session)
            tail = await asyncio.to_thread(server.status)
            await server.arm(session)
            await work
            return base, tail, expected

    base, tail, expected = asyncio.run(run())
    tokens = sum(group["tokens"] for group in base["groups"])
    assert expected == {"from_tp": 1, "to_tp": 2, "requests": 6, "tokens": tokens, "parked": 0, "recomputed_tokens": 0}
    made = tail["switches"][-1]
    assert (made["requests"], made["parked"], made["tokens"]) == (6, 0, tokens)
    assert base["requests"] == tail["requests"] == 6
    assert [group["running"] for group in base["groups"]] == [3, 3]
    assert [group["running"] for group in tail["groups"]] == [6]
    for group in base["groups"] + tail["groups"]:
        assert group["waiting"] == 0 and 0 < group["kv_used"] <= group["kv_total"]
    assert tail["groups"][0]["kv_total"] >= base["groups"][0]["kv_total"]


# -- /pat/reconfigure ---------------------------------------------------------------------------------------


def test_reconfigure_answers_with_the_record(server):
    response = server.post("/pat/reconfigure", {"tp": 2})
    assert response.status_code == 200
    assert response.json() == server.status()["switches"][-1]
    assert response.json()["phases"]["prepare"] >= 0
    again = server.post("/pat/reconfigure", {"tp": 2})
    assert again.status_code == 200, "already there"


@pytest.mark.parametrize("tp", [3, 4, 8, 10**30])
def test_impossible_layouts_get_400_with_the_possible_ones(server, tp):
    before = server.status()["num_switches"]
    response = server.post("/pat/reconfigure", {"tp": tp})
    assert response.status_code == 400
    assert "[1, 2]" in response.json()["error"]["message"]
    assert server.status()["num_switches"] == before


BAD_BODIES = {
    "empty": b"",
    "garbage": b"tp=2",
    "not utf-8": b"\xff\xfe\x00",
    "list": b"[2]",
    "number": b"2",
    "null": b"null",
    "missing": b"{}",
    "string": b'{"tp": "2"}',
    "bool": b'{"tp": true}',
    "none": b'{"tp": null}',
    "zero": b'{"tp": 0}',
    "negative": b'{"tp": -2}',
    "float": b'{"tp": 2.0}',
    "infinite": b'{"tp": 1e999}',
    "no truth value": b'{"tp": 2, "dry_run": 1}',
    "unknown field": b'{"tp": 2, "dp": 1}',
    "too many digits": b'{"tp": ' + b"9" * 5000 + b"}",
    "deep": b"[" * 30_000,
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_bad_bodies_get_400(server, kind):
    before = server.status()
    response = requests.post(server.url + "/pat/reconfigure", data=BAD_BODIES[kind], timeout=500)
    assert response.status_code == 400, response.text
    assert '{"tp": 2}' in response.json()["error"]["message"], "says what to send"
    assert server.status()["layout"] == before["layout"]


def test_engine_unharmed_by_bad_bodies(server):
    assert server.get("/pat/reconfigure").status_code == 405
    assert server.post("/pat/status").status_code == 405
    unharmed(server)


def test_second_reconfiguration_gets_409(server):
    async def run():
        async with server.session() as session:
            with fault(server, "QUIESCE:1:hold"):
                first = asyncio.ensure_future(server.reconfigure_async(session, 2))
                await held(server)
                status = await asyncio.to_thread(server.status)
                assert status["target"] == {"tp": 2, "dp": 1} and status["layout"] == {"tp": 1, "dp": 2}
                for tp in (1, 2):
                    code, answer = await server.reconfigure_async(session, tp)
                    assert code == 409 and "under way" in answer["error"]["message"]
                assert not first.done()
            code, record = await first
            assert code == 200 and record["to_tp"] == 2

    asyncio.run(run())
    unharmed(server)


def test_a_flush_that_waits_holds_up_nothing(server, llama):
    """It waits for a request to end; a switch, and an update of the weights in a pause, do not wait for it."""

    async def run():
        async with server.session() as session:
            await server.arm(session, {"arrived": 1, "step": 5, "hold": True})
            work = asyncio.ensure_future(server.one(session, body(1, 3500, rid="held")))
            await server.reached(session)
            flush = asyncio.ensure_future(session.post(server.url + "/flush_cache?timeout=500"))
            assert (await server.reconfigure_async(session, 2))[0] == 200
            pause, update = {"mode": "in_place"}, {"model_path": str(llama), "flush_cache": False}
            for path, data in (("pause_generation", pause), ("update_weights_from_disk", update)):
                async with session.post(f"{server.url}/{path}", json=data) as response:
                    assert response.status == 200
            assert not flush.done()
            pause["mode"] = "retract"
            async with session.post(server.url + "/pause_generation", json=pause) as response:
                assert response.status == 200
            assert (await flush).status == 200, "no request has KV any more"
            for path, data in (("continue_generation", {}), ("abort_request", {"rid": "held"})):
                async with session.post(f"{server.url}/{path}", json=data) as response:
                    assert response.status == 200
            await server.arm(session)
            await work

    asyncio.run(run())
    unharmed(server)


def test_memory_is_not_released_while_requests_run(server):
    """SGLang would end the engine."""

    async def run():
        async with server.session() as session:
            await server.arm(session, {"arrived": 1, "step": 5, "hold": True})
            work = asyncio.ensure_future(server.one(session, body(1, 3500, rid="held")))
            await server.reached(session)
            refused = await asyncio.to_thread(server.post, "/release_memory_occupation", {})
            async with session.post(server.url + "/abort_request", json={"rid": "held"}) as response:
                assert response.status == 200
            await server.arm(session)
            await work
            return refused

    refused = asyncio.run(run())
    assert refused.status_code == 400 and "1 requests run: memory is released once all have ended" in refused.text
    unharmed(server)
    assert server.post("/release_memory_occupation", {}).status_code == 200
    assert server.post("/resume_memory_occupation", {}).status_code == 200
    unharmed(server)


def test_many_reconfigurations_at_once(server):
    async def run() -> list[int]:
        async with server.session() as session:
            await server.arm(session, {"arrived": 4, "step": 5})
            work = asyncio.ensure_future(server.generate_async([body(i, 200) for i in range(4)]))
            await server.reached(session)
            answers = await asyncio.gather(*(server.reconfigure_async(session, 2 - i % 2) for i in range(12)))
            assert all(len(answer["output_ids"]) == 200 for answer in await work)
            return [code for code, _ in answers]

    codes = asyncio.run(run())
    assert set(codes) <= {200, 409} and 200 in codes
    unharmed(server)
