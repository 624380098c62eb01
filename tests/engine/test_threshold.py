"""Keys, metrics and the threshold policy: one server; and the degree in which a round starts."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest
import requests

from sglang_pat.testing.server import Server

from .conftest import FORGETS_RETRACTIONS
from .streams import NEVER_ENDS, Body, body, endless, read_degrees, tokens, wait_for_layout, wait_for_status

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

    def switches(self, before: dict[str, Any]) -> list[dict[str, Any]]:
        """Number of switches since that status."""
        now = self.status()
        return now["switches"][before["num_switches"] - now["num_switches"] :]

    def begin(self, session: aiohttp.ClientSession, *bodies: Body) -> list[asyncio.Task]:
        return [asyncio.ensure_future(self.server.generate_one(session, one)) for one in bodies]

    async def abort(self, session: aiohttp.ClientSession, *bodies: Body) -> None:
        for one in bodies:
            about = {"json": {"rid": one["rid"]}, "headers": ADMIN_HEADERS}
            async with session.post(self.server.url + "/abort_request", **about) as response:
                assert response.status == 200

    def metrics(self) -> dict[str, float]:
        """Sample name with labels → value."""
        text = self.ask("GET", "/metrics").text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("sglang"))
        return {name: float(value) for name, value in pairs}


@pytest.fixture
def watched(servers, llama) -> Client:
    return Client(servers.get(llama, *WATCHED))


@pytest.mark.parametrize("key, as_user, as_admin", [(None, 401, 401), (API_KEY, 200, 401), (ADMIN_KEY, 401, 200)])
def test_keys(watched, key, as_user, as_admin):
    """Our routes beside SGLang's; all combinations: ``tests/contract/test_pat_routes.py``."""
    for path in ("/pat/status", "/model_info"):
        assert watched.ask("GET", path, key).status_code == as_user
    assert watched.ask("POST", "/pat/reconfigure", key, json={"tp": 1}).status_code == as_admin
    assert watched.ask("POST", "/flush_cache", key).status_code == as_admin


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {API_KEY}"}) as opened:
        yield opened


async def test_threshold_policy_merges_for_the_tail_and_splits_when_idle(watched, session, servers, llama):
    """Two responses go on until the test has seen the merge."""
    bodies = [body(i, length) for i, length in enumerate((40, 55, 70, 85, 100, 115))]
    two = [endless(10 + i, rid=f"endless-{i}") for i in range(2)]
    wanted = await servers.stock(llama).generate_async(bodies)
    before = await wait_for_layout(watched.status, 1)
    tail = watched.begin(session, *two)
    assert tokens(await asyncio.gather(*watched.begin(session, *bodies))) == tokens(wanted)
    await wait_for_layout(watched.status, 2)
    await watched.abort(session, *two)
    await asyncio.gather(*tail)
    await wait_for_layout(watched.status, 1)
    found = [(r["from_tp"], r["to_tp"], r["requests"], r["reason"]) for r in watched.switches(before)]
    assert found[-2:] == [(1, 2, 2, "threshold"), (2, 1, 0, "threshold")]


async def test_threshold_policy_splits_when_requests_arrive(watched, session):
    before, long = await wait_for_layout(watched.status, 1), endless(1, rid="endless")
    first = watched.begin(session, long)
    await wait_for_layout(watched.status, 2)
    await asyncio.gather(*watched.begin(session, *(body(2 + i, 100) for i in range(4))))
    await wait_for_layout(watched.status, 2)
    await watched.abort(session, long)
    await asyncio.gather(*first)
    await wait_for_layout(watched.status, 1)
    records = watched.switches(before)
    assert [r["to_tp"] for r in records] == [2, 1, 2, 1] and records[0]["requests"] == 1


async def test_two_agents_merge_once_and_split_once(watched, session):
    """Six turns each.  The tools answer when the engine is empty: then it would go to the base layout, if nobody had
    announced the round."""
    before = await wait_for_layout(watched.status, 1)
    begun = {"requests": 2, "prompt_tokens": 20, "max_new_tokens": 3000}
    assert watched.ask("POST", "/pat/round", API_KEY, json=begun).status_code == 200
    assert watched.status()["rounds"]["missing"] == 2
    agents = [body(i, 3000, rid=f"agent-{i}") for i in range(2)]
    turns = watched.begin(session, *agents)
    await wait_for_layout(watched.status, 2)
    await watched.abort(session, *agents)
    for _ in range(5):
        answers = await asyncio.gather(*turns)
        # That it is empty, and what follows from it, the coordinator hears and decides at once.
        status = await wait_for_status(watched.status, lambda status: not status["requests"])
        assert (status["layout"]["tp"], status["switching"]) == (2, False)
        for one, answer in zip(agents, answers, strict=True):
            one["input_ids"] = [*one["input_ids"], *answer["output_ids"], 7, 8, 9]  # what a tool answers
            one["sampling_params"] = one["sampling_params"] | {"max_new_tokens": 5}
        turns = watched.begin(session, *agents)
    await asyncio.gather(*turns)
    assert watched.status()["rounds"]["missing"] == 0
    assert watched.ask("DELETE", "/pat/round", API_KEY).status_code == 200
    assert not (await wait_for_layout(watched.status, 1))["rounds"]["open"]
    assert [r["to_tp"] for r in watched.switches(before)] == [2, 1]


def test_metrics(watched):
    status = asyncio.run(wait_for_layout(watched.status, 1))
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


@pytest.mark.long
def test_the_round_after_one_with_retractions_starts_in_twice_the_degree(servers, llama, tmp_path):
    """16 requests of 132 tokens find no room in 700: a third of them can end together."""
    flags = "--tp 1 --dp 2 --adaptive-tp --pat-policy threshold --pat-switch-at 1 --schedule-conservativeness 0.05"
    log, read = tmp_path / "log", 0
    server = servers.get(llama, *flags.split(), "--pat-log", str(log), max_total_tokens=700, env=FORGETS_RETRACTIONS)

    def one_round(tokens: int) -> tuple[int, int, list[int]]:
        """32 requests, announced: how many were retracted, and the degrees of ``read_degrees``."""
        nonlocal read
        before = server.status()["retracted"]
        server.post("/pat/round", {"requests": 32, "prompt_tokens": 12, "max_new_tokens": tokens}).raise_for_status()
        sampling = {"temperature": 0, "max_new_tokens": tokens} | NEVER_ENDS
        prompts = [[6 + (97 * number + 31 * place) % 490 for place in range(12)] for number in range(32)]
        # In one request: those that come while others run take turns, and need less room.
        server.post("/generate", {"input_ids": prompts, "sampling_params": sampling}).raise_for_status()
        requests.delete(f"{server.url}/pat/round").raise_for_status()
        start, tps, read = read_degrees(server.status, log, read)
        return server.status()["retracted"] - before, start, tps

    assert one_round(20) == (0, 1, [1])
    retracted, start, _ = one_round(120)
    assert retracted >= 4 and start == 1
    assert one_round(120)[1:] == (2, [2])
    # A weight update finds the engine in the base layout, or takes it there.
    assert server.post("/update_weights_from_disk", {"model_path": str(llama)}).json()["success"]
    assert server.status()["layout"]["tp"] == 1
