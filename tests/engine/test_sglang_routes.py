"""SGLang's own endpoints answer as a stock server's do, in every layout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import requests

from sglang_pat.host.adapter import FOLDER
from sglang_pat.testing.server import Server

from .streams import body, check_unharmed, hold

OLD = FOLDER == "v0_5_12"
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
    stock = servers.stock(llama).get(path)
    server = servers.adaptive(llama)
    for tp in (1, 2):
        server.reconfigure(tp)
        ours = server.get(path)
        assert ours.status_code == stock.status_code
        wanted = stock.json()
        if not OLD and path == "/v1/loads":  # of its sections the first
            wanted["loads"] = [{name: load[name] for name in ours.json()["loads"][0]} for load in wanted["loads"]]
        assert shape(ours.json()) == shape(wanted)


def shape(value: Any) -> Any:
    """Names and types, without the values."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


async def test_loads_count_all_ranks(server, session):
    work = await hold(server, session, [body(i, 40) for i in range(4)], step=5)
    for tp in (1, 2):
        await server.reconfigure_async(session, tp)
        loads = server.get("/v1/loads").json()
        assert (loads["aggregate"]["total_running_reqs"] if OLD else loads["loads"][0]["num_running_reqs"]) == 4
        assert not OLD or [load["num_reqs"] for load in server.get("/get_load").json()] == [4]
    await server.set_schedule(session)
    await asyncio.gather(*work)


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

    stock = ask(servers.stock(llama))
    server = servers.adaptive(llama)
    for tp in (1, 2):
        server.reconfigure(tp)
        if name in REFUSED:
            assert ask(server) >= 400
        else:
            assert ask(server) == stock
    check_unharmed(server)
