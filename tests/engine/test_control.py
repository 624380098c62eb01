"""What an operator sees and does: ``/pat/status``, ``/pat/reconfigure``, gauges."""

from __future__ import annotations

import asyncio
import re

from sglang_pat.testing.server import Server

from .conftest import fault, wait_until_held
from .streams import body, check_unharmed, endless, hold, post

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


def gauge(server: Server, name: str) -> list[float]:
    """SGLang's, a value for each rank."""
    found = re.findall(rf'^sglang:{name}{{.*dp_rank="(\d+)".*}} (\S+)$', server.get("/metrics").text, re.MULTILINE)
    return [float(value) for _, value in sorted(found)]


async def test_the_load_of_each_group(server, session):
    """Status and SGLang's gauges: each rank has series of its own, and a follower's are 0."""
    logged = 40  # SGLang's ``decode_log_interval``: gauges are set at every so many decode steps
    seen, gauges = [], []
    work = await hold(server, session, [body(i, 4 * logged) for i in range(6)], step=logged + 2)
    for tp in (1, 2, 1):
        if seen:
            expected = server.post("/pat/reconfigure", {"tp": tp, "dry_run": True}).json()
            assert expected.pop("expected_seconds") is None and "without a profile" in expected.pop("why")
            assert server.status() | {"totals": seen[-1]["totals"]} == seen[-1]  # but for the time that passes
            await server.set_schedule(session, {"tp": tp, "step": 0}, {"step": logged + 2, "hold": True})
            (made,) = (await server.wait_for_schedule(session))["switches"]
            assert expected == {name: made[name] for name in expected}
        seen.append(server.status())
        gauges.append((gauge(server, "num_running_reqs"), sum(gauge(server, "num_used_tokens"))))
    await server.set_schedule(session)
    await asyncio.gather(*work)
    for status, running in zip(seen, ([3, 3], [6], [3, 3]), strict=True):
        assert status["requests"] == 6 and [group["running"] for group in status["groups"]] == running
        for group in status["groups"]:
            assert group["waiting"] == 0 and 0 < group["kv_used"] <= group["kv_total"]
    assert seen[1]["groups"][0]["kv_total"] >= seen[0]["groups"][0]["kv_total"]
    (apart, some), (merged, more), (split, most) = gauges
    assert apart == split == [3, 3] and merged == [6, 0]
    assert 0 < some < more < most


# -- /pat/reconfigure ---------------------------------------------------------------------------------------


def test_reconfigure_answers_with_the_record(server):
    response = server.post("/pat/reconfigure", {"tp": 2})
    assert response.status_code == 200
    assert response.json() == server.status()["switches"][-1]
    assert response.json()["phases"]["prepare"] >= 0
    again = server.post("/pat/reconfigure", {"tp": 2})
    assert again.status_code == 200, "already there"


async def test_second_reconfiguration_gets_409(server, session):
    with fault(server, "QUIESCE:1:hold"):
        first = asyncio.ensure_future(server.reconfigure_async(session, 2))
        await wait_until_held(server)
        status = await asyncio.to_thread(server.status)
        assert status["target"] == {"tp": 2, "dp": 1} and status["layout"] == {"tp": 1, "dp": 2}
        for tp in (1, 2):
            code, answer = await server.reconfigure_async(session, tp)
            assert code == 409 and "under way" in answer["error"]["message"]
        assert not first.done()
    code, record = await first
    assert code == 200 and record["to_tp"] == 2
    check_unharmed(server)


async def test_what_waits_for_a_request_holds_up_nothing(server, session, llama):
    """A flush waits for it to end; a switch, and an update of the weights in a pause, do not wait for the flush.
    Memory is not released while it runs: SGLang would end the engine."""
    (work,) = await hold(server, session, [endless(1, rid="held")], step=5)
    refused = await asyncio.to_thread(server.post, "/release_memory_occupation", {})
    assert refused.status_code == 400
    assert "1 requests run: memory is released once all have ended" in refused.text
    flush = asyncio.ensure_future(post(session, server, "/flush_cache?timeout=500"))
    assert (await server.reconfigure_async(session, 2))[0] == 200
    assert await post(session, server, "/pause_generation", {"mode": "in_place"}) == 200
    update = {"model_path": str(llama), "flush_cache": False}
    assert await post(session, server, "/update_weights_from_disk", update) == 200
    assert not flush.done()
    assert await post(session, server, "/pause_generation", {"mode": "retract"}) == 200
    assert await flush == 200, "no request has KV any more"
    assert await post(session, server, "/continue_generation", {}) == 200
    assert await post(session, server, "/abort_request", {"rid": "held"}) == 200
    await server.set_schedule(session)
    await work
    check_unharmed(server)
    assert server.post("/release_memory_occupation", {}).status_code == 200
    assert server.post("/resume_memory_occupation", {}).status_code == 200
    check_unharmed(server)


async def test_many_reconfigurations_at_once(server, session):
    await server.set_schedule(session, {"arrived": 4, "step": 5})
    work = asyncio.ensure_future(server.generate_async([body(i, 200) for i in range(4)]))
    await server.wait_for_schedule(session)
    answers = await asyncio.gather(*(server.reconfigure_async(session, 2 - i % 2) for i in range(12)))
    assert all(len(answer["output_ids"]) == 200 for answer in await work)
    codes = {code for code, _ in answers}
    assert codes <= {200, 409} and 200 in codes
    check_unharmed(server)
