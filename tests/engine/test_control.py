"""What an operator sees and does: /pat/*, keys, SGLang's own endpoints, metrics, the policy, the Python API."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
import requests

from sglang_pat.testing.server import Server

from .conftest import count_start

API_KEY, ADMIN_KEY = "api-secret", "admin-secret"
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}


def body(seed: int, tokens: int, **fields: Any) -> dict[str, Any]:
    ids = [6 + (seed * 97 + i * 31) % 490 for i in range(12)]
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling} | fields


@pytest.fixture
def server(servers, llama) -> Server:
    return servers.adaptive(llama)


def unharmed(server: Server) -> None:
    """The engine answers, and switches."""
    server.reconfigure(1)
    up = server.reconfigure(2)
    down = server.reconfigure(1)
    assert up["to_tp"] == 2 and down["to_tp"] == 1
    assert len(server.generate([body(1, 5)])[0]["output_ids"]) == 5


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
            assert await asyncio.to_thread(server.status) == base
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
    """A switch waits for a control request under way: a flush that waits for a request to end."""

    async def until(condition) -> dict[str, Any]:
        """What is waited for stays as it is until this test goes on."""
        while not condition(status := await asyncio.to_thread(server.status)):
            await asyncio.sleep(0.02)
        return status

    async def run():
        async with server.session() as session:
            await server.arm(session, {"arrived": 1, "step": 5, "hold": True})
            work = asyncio.ensure_future(server.one(session, body(1, 3500, rid="held")))
            await server.reached(session)
            flush = asyncio.ensure_future(session.post(server.url + "/flush_cache?timeout=500"))
            await until(lambda status: status["controls"] == 1)
            first = asyncio.ensure_future(server.reconfigure_async(session, 2))
            status = await until(lambda status: status["switching"])
            assert status["target"] == {"tp": 2, "dp": 1} and status["layout"] == {"tp": 1, "dp": 2}
            for tp in (1, 2):
                code, answer = await server.reconfigure_async(session, tp)
                assert code == 409 and "under way" in answer["error"]["message"]
            assert not first.done()
            async with session.post(server.url + "/abort_request", json={"rid": "held"}) as response:
                assert response.status == 200
            await server.arm(session)
            await work
            assert (await flush).status == 200
            code, record = await first
            assert code == 200 and record["to_tp"] == 2

    asyncio.run(run())
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


# -- SGLang's own information --------------------------------------------------------------------------------

CHANGING = {"last_gen_throughput", "memory_usage", "step_time_dict", "avg_spec_accept_length"}
"""Fields of ``/server_info`` that are measurements."""


def test_server_info_is_constant_over_switches(server):
    def info() -> dict[str, Any]:
        data = server.get("/server_info").json()
        (state,) = data.pop("internal_states")
        return data | {f"internal {name}": value for name, value in state.items() if name not in CHANGING}

    base = info()
    assert (base["tp_size"], base["dp_size"]) == (2, 1), "to the outside: one engine of two ranks"
    assert (base["internal tp_size"], base["internal dp_size"]) == (2, 1)
    server.generate([body(i, 20) for i in range(4)])
    for tp in (2, 1):
        server.reconfigure(tp)
        now = info()
        assert {name: (base.get(name), now.get(name)) for name in base | now if base.get(name) != now.get(name)} == {}


INFORMATION = ["/model_info", "/get_model_info", "/v1/loads", "/get_load", "/v1/models", "/get_weight_version"]


@pytest.mark.parametrize("path", INFORMATION)
def test_information_has_the_shape_of_stock(servers, llama, path):
    stock = servers.stock(llama, max_total_tokens=65536).get(path)
    server = servers.adaptive(llama)
    for tp in (1, 2):
        server.reconfigure(tp)
        ours = server.get(path)
        assert ours.status_code == stock.status_code
        assert shape(ours.json()) == shape(stock.json())


def shape(value: Any) -> Any:
    """Names and types, without the values."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def test_loads_count_all_ranks(server):
    async def run() -> None:
        async with server.session() as session:
            await server.arm(session, {"arrived": 4, "step": 5, "hold": True})
            work = asyncio.ensure_future(server.generate_async([body(i, 40) for i in range(4)]))
            await server.reached(session)
            for tp in (1, 2):
                await server.reconfigure_async(session, tp)
                async with session.get(server.url + "/v1/loads") as response:
                    loads = await response.json()
                assert loads["aggregate"]["total_running_reqs"] == 4
                async with session.get(server.url + "/get_load") as response:
                    (load,) = await response.json()
                assert load["num_reqs"] == 4
            await server.arm(session)
            await work

    asyncio.run(run())


ADMIN = {
    "flush": ("POST", "/flush_cache", None),
    "flush_slime": ("GET", "/flush_cache", None),
    "health_generate": ("GET", "/health_generate", None),
    "abort_nobody": ("POST", "/abort_request", {"rid": "nobody"}),
    "weight_version": ("GET", "/weight_version", None),
    "pull_weights": ("POST", "/pull_weights", {}),  # slime's, which this SGLang does not have
    "post_process_weights": ("POST", "/post_process_weights", {}),
    "slow_down": ("POST", "/slow_down", {"forward_sleep_time": 0.0}),
    # As it is: the server is for other tests too.
    "set_internal_state": ("POST", "/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 2048}}),
    "freeze_gc": ("POST", "/freeze_gc", None),
    "open_session": ("POST", "/open_session", {"capacity_of_str_len": 100, "session_id": "nobody"}),
    "configure_logging": ("POST", "/configure_logging", {"log_requests": False}),
    "weights_checker": ("POST", "/weights_checker", {"action": "checksum"}),
    "weights_checker_wrong": ("POST", "/weights_checker", {"action": "nothing"}),
    "update_weight_version": ("POST", "/update_weight_version", {"new_version": "default"}),
    "load_lora": ("POST", "/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
    "destroy_missing_group": ("POST", "/destroy_weights_update_group", {"group_name": "missing"}),
    "loads_prometheus": ("GET", "/v1/loads?format=prometheus", None),
    "health": ("GET", "/health", None),
    "ping": ("GET", "/ping", None),
}
"""Endpoints of slime, AReaL and others that no other test asks; they must answer as stock does, in every layout."""

REFUSED = {"open_session"}
"""Features that the adaptive engine does not have: an error, not a hang."""


@pytest.mark.parametrize("name", ADMIN)
def test_admin_endpoint_answers_as_stock(servers, llama, name):
    method, path, data = ADMIN[name]

    def ask(server: Server) -> int:
        return requests.request(method, server.url + path, json=data, timeout=500).status_code

    stock = ask(servers.stock(llama, max_total_tokens=65536))
    server = servers.adaptive(llama)
    for tp in (1, 2):
        server.reconfigure(tp)
        if name in REFUSED:
            assert ask(server) >= 400
        else:
            assert ask(server) == stock
    unharmed(server)


def test_profile_across_a_switch(server, tmp_path):
    start = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": False, "record_shapes": False}
    assert server.post("/start_profile", start).status_code == 200
    server.generate([body(i, 5) for i in range(2)])
    server.reconfigure(2)
    server.generate([body(3, 5)])
    assert server.post("/stop_profile").status_code == 200
    assert len(list(tmp_path.rglob("*.trace.json.gz"))) == 2, "one trace from each rank"
    unharmed(server)


# -- keys, metrics and the threshold policy: one server ----------------------------------------------------------

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
    """Wait until the status is so; what is waited for here lasts until the test goes on."""
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


# -- without --adaptive-tp ----------------------------------------------------------------------------------------


def python(code: str, *argv: str, timeout: float = 180) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=timeout)


def test_without_the_flag_nothing_of_the_engine_is_imported(llama):
    code = """
import json, runpy, sys
from sglang_pat import launch_server

def run_module(name, **_):
    import sglang.launch_server, sglang.srt.entrypoints.http_server
    print(json.dumps([name, sys.argv[1:], [m for m in sys.modules if m.startswith("sglang_pat")]]))

runpy.run_module = run_module
launch_server.main(["--model-path", sys.argv[1], "--tp", "1"])
"""
    name, argv, modules = json.loads(python(code, str(llama)).stdout.splitlines()[-1])
    assert name == "sglang.launch_server" and argv == ["--model-path", str(llama), "--tp", "1"]
    launcher = {"layout", "version", "launch_server", "plugin", "sglang"}
    launcher |= {"sglang.cpu_shim", "sglang.launch"}
    launcher |= {f"sglang.launch.{name}" for name in ("processes", "noise", "folder")}
    assert set(modules) <= {"sglang_pat"} | {f"sglang_pat.{name}" for name in launcher}


@pytest.mark.parametrize("flags", [("--pat-policy", "manual"), ("--pat-switch-at=4",)])
def test_stray_flags_are_refused_with_one_line(llama, flags):
    command = [sys.executable, "-m", "sglang_pat.launch_server", "--model-path", str(llama), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert "--adaptive-tp" in line and flags[0] in line


# -- the Python API -----------------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, json, sys
import sglang_pat

def main(model, schedule):
    try:
        sglang_pat.Engine(model_path=model)
    except ValueError as error:
        refusal = str(error)
    engine = sglang_pat.Engine(
        model_path=model, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="schedule", pat_schedule=schedule,
        dtype="float32", max_total_tokens=16384, random_seed=1, log_level="error",
    )
    params = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    prompts = [[6 + i, 70, 80] for i in range(3)]
    base = engine.layout

    async def switching():
        work = asyncio.ensure_future(engine.async_generate(input_ids=prompts, sampling_params=params))
        await engine.async_schedule()
        records = [await engine.async_reconfigure(tp) for tp in (1, 2)]
        await engine.async_set_schedule([])
        return [answer["output_ids"] for answer in await work], [3] + [record["requests"] for record in records]

    # The first switch is that of the file.
    switched, moved = engine.loop.run_until_complete(switching())
    engine.set_schedule([])
    plain = [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=params)]

    def prefilled(prompts):
        engine.trace()
        answers = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 4})
        steps = [step for step in engine.trace() if step["kind"] == "prefill"]
        return [answer["output_ids"] for answer in answers], sum(step["tokens"] for step in steps)

    def flush():
        # Without a time limit SGLang refuses in the step that follows the last answer.
        assert engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60)).success

    long = [[6 + i] * 300 for i in range(4)]
    flush()
    told, computed = prefilled(long)
    flush()
    engine.inject_prefixes(long)
    engine.inject_prefixes(long)  # what is there already stays
    injected = prefilled(long)[1]
    engine.inject_prefixes([[200 + i] * 6000 for i in range(8)])  # more than the pool holds
    flush()
    honest = prefilled(long) == (told, computed)
    try:
        engine.reconfigure(tp=3)
    except sglang_pat.sglang.server.engine.ReconfigureError as error:
        code = error.code
    record = engine.reconfigure(tp=1)
    status = engine.status()
    info = engine.get_server_info()
    engine.shutdown()
    print(json.dumps(dict(
        refusal=refusal, base=[base.tp, base.dp], same=switched == plain, moved=moved, code=code, to=record["to_tp"],
        layout=status["layout"], switches=status["num_switches"], world=[info["tp_size"], info["dp_size"]],
        computed=computed, injected=injected, honest=honest,
    )))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_python_api(llama, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    schedule = tmp_path / "schedule.jsonl"
    schedule.write_text('{"arrived": 3}\n{"tp": 2, "step": 20, "hold": true}\n')
    count_start()
    command = [sys.executable, str(script), str(llama), str(schedule)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert "adaptive_tp=True" in found.pop("refusal")
    assert found == {
        "base": [1, 2], "same": True, "moved": [3, 3, 3], "code": 400, "to": 1,
        "layout": {"tp": 1, "dp": 2}, "switches": 4, "world": [2, 1],
        "computed": 4 * 300, "injected": 4, "honest": True,
    }  # fmt: skip


# -- without a tokenizer: tokens come straight from the ranks, in order all the same -----------------------------


def test_no_tokenizer(servers, llama):
    server = servers.adaptive(llama, 2, "--skip-tokenizer-init")
    stock = servers.stock(llama, max_total_tokens=65536)
    bodies = [body(seed, 120) for seed in range(4)]

    async def stream(session: aiohttp.ClientSession, request: dict[str, Any]) -> list[list[int]]:
        return [chunk["output_ids"] async for chunk in server.stream(session, request)]

    async def run() -> list[list[list[int]]]:
        async with server.session() as session:
            switches = ({"tp": tp, "arrived": 4, "step": step} for tp, step in ((2, 20), (1, 50), (2, 80)))
            await server.arm(session, *switches)
            return await asyncio.gather(*(stream(session, request) for request in bodies))

    for chunks, expected in zip(asyncio.run(run()), stock.generate(bodies), strict=True):
        assert chunks[-1] == expected["output_ids"]
        assert all(later[: len(chunk)] == chunk for chunk, later in zip(chunks, chunks[1:], strict=False))
