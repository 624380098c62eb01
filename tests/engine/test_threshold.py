"""Keys, metrics and the threshold policy: one server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
import requests

from sglang_pat.testing.server import Server

from .controls import body

API_KEY, ADMIN_KEY = "api-secret", "admin-secret"
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}

WATCHED = (
    "--tp 1 --dp 2 --adaptive-tp --pat-policy threshold --pat-switch-at 2 --enable-metrics "
    f"--api-key {API_KEY} --admin-api-key {ADMIN_KEY}"
).split()


class Client:
    """Requests to a server with keys."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self, method: str, path: str, key: str | None = None, **kwargs: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return requests.request(method, self.server.url + path, headers=headers, timeout=500, **kwargs)

    def status(self) -> dict[str, Any]:
        return self.ask("GET", "/pat/status", API_KEY).json()

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {API_KEY}"})

    def metrics(self) -> dict[str, float]:
        """Sample name with labels → value."""
        text = self.ask("GET", "/metrics").text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("sglang"))
        return {name: float(value) for name, value in pairs}


@pytest.fixture
def watched(servers, llama) -> Client:
    return Client(servers.get(llama, *WATCHED))


@pytest.mark.parametrize(
    "key, as_user, as_admin", [(None, 401, 401), ("wrong", 401, 401), (API_KEY, 200, 401), (ADMIN_KEY, 401, 200)]
)
def test_keys(watched, key, as_user, as_admin):
    """``/pat/status`` like any endpoint; ``/pat/reconfigure`` like SGLang's admin-optional ones."""
    assert watched.ask("GET", "/pat/status", key).status_code == as_user
    assert watched.ask("GET", "/model_info", key).status_code == as_user
    assert watched.ask("POST", "/pat/reconfigure", key, json={"tp": 1}).status_code == as_admin
    assert watched.ask("POST", "/flush_cache", key).status_code == as_admin
    # Nobody without the key learns what a good body would be.
    assert watched.ask("POST", "/pat/reconfigure", key, data=b"junk").status_code == (400 if as_admin == 200 else 401)


LENGTHS = (40, 55, 70, 85, 100, 115)


def until(client: Client, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the status is so; what is waited for here lasts until the test goes on.  The limit is pytest's."""
    while not condition(status := client.status()):
        time.sleep(0.02)
    return status


def wait_for_base(client: Client) -> dict[str, Any]:
    """An idle engine goes back there, and stays."""
    return until(client, lambda s: s["layout"]["tp"] == 1 and not s["switching"] and not s["requests"])


async def abort(client: Client, session: aiohttp.ClientSession, rid: str) -> None:
    async with session.post(client.server.url + "/abort_request", json={"rid": rid}, headers=ADMIN_HEADERS) as response:
        assert response.status == 200


def test_threshold_policy_merges_for_the_tail_and_splits_when_idle(watched, servers, llama):
    """Two responses go on until the test has seen the merge."""
    bodies = [body(i, length) for i, length in enumerate(LENGTHS)]
    endless = [body(10 + i, 3000, rid=f"endless-{i}") for i in range(2)]
    wanted = servers.stock(llama, max_total_tokens=65536).generate(bodies)
    watched = Client(servers.get(llama, *WATCHED))
    before = wait_for_base(watched)["num_switches"]

    async def run():
        async with watched.session() as session:
            tail = [asyncio.ensure_future(watched.server.one(session, b)) for b in endless]
            answers = await asyncio.gather(*(watched.server.one(session, b) for b in bodies))
            await asyncio.to_thread(until, watched, lambda s: s["layout"]["tp"] == 2 and not s["switching"])
            for request in endless:
                await abort(watched, session, request["rid"])
            await asyncio.gather(*tail)
            return answers

    for _ in range(2):
        answers = asyncio.run(run())
        assert [a["output_ids"] for a in answers] == [w["output_ids"] for w in wanted]
        status = wait_for_base(watched)
        records = status["switches"][before - status["num_switches"] :]
        assert [(r["from_tp"], r["to_tp"], r["requests"], r["reason"]) for r in records[-2:]] == [
            (1, 2, 2, "threshold"),
            (2, 1, 0, "threshold"),
        ]
        before = status["num_switches"]


def test_threshold_policy_splits_when_requests_arrive(watched):
    before = wait_for_base(watched)["num_switches"]

    def merged() -> None:
        until(watched, lambda s: s["layout"]["tp"] == 2 and not s["switching"])

    async def run():
        async with watched.session() as session:
            first = asyncio.ensure_future(watched.server.one(session, body(1, 3500, rid="endless")))
            await asyncio.to_thread(merged)
            await asyncio.gather(*(watched.server.one(session, body(2 + i, 100)) for i in range(4)))
            await asyncio.to_thread(merged)
            await abort(watched, session, "endless")
            await first

    asyncio.run(run())
    status = wait_for_base(watched)
    records = status["switches"][before - status["num_switches"] :]
    assert [r["to_tp"] for r in records] == [2, 1, 2, 1]
    assert [r["requests"] for r in records][0] == 1


TOOL = [7, 8, 9]
"""What a tool answers."""


def test_two_agents_merge_once_and_split_once(watched):
    """Six turns each.  The tools answer when the engine is empty: then it would go to the base layout, if nobody had
    announced the round."""
    before = wait_for_base(watched)["num_switches"]
    begun = {"requests": 2, "prompt_tokens": 12, "max_new_tokens": 3000}
    assert watched.ask("POST", "/pat/round", API_KEY, json=begun).status_code == 200
    assert watched.status()["rounds"]["missing"] == 2

    async def run():
        async with watched.session() as session:
            bodies = [body(i, 3000, rid=f"agent-{i}") for i in range(2)]
            turns = [asyncio.ensure_future(watched.server.one(session, one)) for one in bodies]
            await asyncio.to_thread(until, watched, lambda s: s["layout"]["tp"] == 2 and not s["switching"])
            for one in bodies:
                await abort(watched, session, one["rid"])
            for _ in range(5):
                answers = await asyncio.gather(*turns)
                # That it is empty, and what follows from it, the coordinator hears and decides at once.
                status = await asyncio.to_thread(until, watched, lambda s: not s["requests"])
                assert (status["layout"]["tp"], status["switching"]) == (2, False)
                for one, answer in zip(bodies, answers, strict=True):
                    one["input_ids"] = [*one["input_ids"], *answer["output_ids"], *TOOL]
                    one["sampling_params"] = one["sampling_params"] | {"max_new_tokens": 5}
                turns = [watched.server.one(session, one) for one in bodies]
            await asyncio.gather(*turns)

    asyncio.run(run())
    assert watched.status()["rounds"]["missing"] == 0
    assert watched.ask("DELETE", "/pat/round", API_KEY).status_code == 200
    status = wait_for_base(watched)
    assert not status["rounds"]["open"]
    assert [r["to_tp"] for r in status["switches"][before - status["num_switches"] :]] == [2, 1]


def test_metrics(watched):
    status = wait_for_base(watched)
    samples = watched.metrics()
    ours = {name: value for name, value in samples.items() if name.startswith("sglang_pat_")}
    assert any(name.startswith("sglang:") for name in samples), "SGLang's own are there as well"

    def total(name: str, **labels: Any) -> float:
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(v for n, v in ours.items() if re.match(rf"{name}(\{{|$)", n) and all(w in n for w in wanted))

    done = status["num_switches"]
    assert done >= 2
    assert total("sglang_pat_switches_total", outcome="done") == done
    assert total("sglang_pat_switches_total", from_tp=1, to_tp=2) == done / 2
    assert total("sglang_pat_switches_total", outcome="aborted") == 0
    assert total("sglang_pat_switch_pause_seconds_count") == done
    pauses = sum(record["pause_seconds"] for record in status["switches"])
    assert total("sglang_pat_switch_pause_seconds_sum") == pytest.approx(pauses)
    for phase in status["switches"][-1]["phases"]:
        assert total("sglang_pat_switch_phase_seconds_count", phase=phase) >= 1
    assert total("sglang_pat_switch_moved_bytes_total") == sum(record["moved_bytes"] for record in status["switches"])
    assert (total("sglang_pat_layout_tp"), total("sglang_pat_layout_dp")) == (1, 2)
    forced = watched.ask("POST", "/pat/reconfigure", ADMIN_KEY, json={"tp": 2})
    assert forced.status_code == 200
