"""New weights reach every layout: on two ranks, on four, and in reshard mode; and while requests are alive."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import long
from .marker_models import make_marker_state_dict
from .streams import GREEDY, hold, post, tokens
from .weight_updates import (
    A,
    B,
    C,
    D,
    E,
    Setup,
    Trainer,
    check_all_layouts,
    check_success,
    read_degree,
    update_from_disk,
    update_from_tensor,
)

SETUPS = {"2ranks": (2,), "4ranks-as-on-cuda": (4, "as on CUDA"), "reshard": (2, "--pat-weights", "reshard")}
QUICK = "4ranks-as-on-cuda"
"""Name of the setup that also runs without ``LONG=1``."""


@pytest.fixture(scope="module", params=[name if name == QUICK else long(name) for name in SETUPS])
def setup(request, servers, marker) -> Setup:
    return Setup(servers, marker, *SETUPS[request.param])


@pytest.fixture(params=[long("base"), "tail"])
def start(request, setup) -> int:
    """Degree in force when the update arrives."""
    return 1 if request.param == "base" else setup.ranks


def test_update_from_disk(setup, start):
    server = setup.start_in(start)
    check_success(update_from_disk(server, setup.marker, B, weight_version="disk"))
    assert read_degree(server) == 1
    assert server.status()["weight_version"] == "disk"
    assert server.get("/model_info").json()["weight_version"] == "disk"
    check_all_layouts(server, B)


def test_update_from_tensor(setup, start):
    server = setup.start_in(start)
    check_success(update_from_tensor(server, C, setup.ranks, weight_version="tensor"))
    assert read_degree(server) == 1
    assert server.status()["weight_version"] == "tensor"
    check_all_layouts(server, C)


def test_update_from_distributed(setup, start):
    server = setup.start_in(start)
    trainer = Trainer(server, setup.ranks)
    try:
        assert read_degree(server) == 1
        server.reconfigure(start)
        trainer.send(D, weight_version="distributed")
        assert read_degree(server) == 1
        assert server.status()["weight_version"] == "distributed"
        check_all_layouts(server, D)
        server.reconfigure(start)
        trainer.send(E)
        check_all_layouts(server, E)
    finally:
        trainer.close()


def test_release_and_resume_memory(setup, start):
    server = setup.start_in(start)
    assert server.post("/release_memory_occupation", {}).status_code == 200
    assert read_degree(server) == 1
    refused = server.post("/pat/reconfigure", {"tp": 2})
    assert refused.status_code == 409 and "resume it first" in refused.json()["error"]["message"]
    assert server.post("/resume_memory_occupation", {}).status_code == 200
    check_all_layouts(server, A)
    server.reconfigure(start)
    for tag in ("kv_cache", "weights"):
        assert server.post("/release_memory_occupation", {"tags": [tag]}).status_code == 200
    for tag in ("weights", "kv_cache"):
        assert server.post("/resume_memory_occupation", {"tags": [tag]}).status_code == 200
    check_success(update_from_disk(server, setup.marker, B))
    check_all_layouts(server, B)


def test_get_weights_by_name(setup, start):
    server = setup.start_in(start)
    name = "model.layers.0.mlp.down_proj.weight"
    for token in (A, B):
        wanted = make_marker_state_dict(token)[name][:3].tolist()
        got = server.post("/get_weights_by_name", {"name": name, "truncate_size": 3}).json()
        assert got == [pytest.approx(row) for row in wanted]
        server.reconfigure(start)
        check_success(update_from_disk(server, setup.marker, B))
        server.reconfigure(start)


# -- while requests are alive: paused, waited for, aborted.  On two ranks --------------------------------------

STEP = 30
"""The decode step at which the engine holds them, after a merge."""


def alive(tokens: int) -> list[dict]:
    return [{"input_ids": [70 + i, 8, 9], "sampling_params": GREEDY | {"max_new_tokens": tokens}} for i in range(4)]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_update_with_requests_alive_in_the_tail(two, session, mode):
    server = await asyncio.to_thread(two.start_in, 1)
    work = await hold(server, session, alive(200), step=STEP, tp=2)
    assert await post(session, server, "/pause_generation", {"mode": mode}) == 200
    await server.set_schedule(session)
    assert server.status()["requests"] == 4
    # Requests that are paused in place hold KV.
    check_success(await asyncio.to_thread(update_from_disk, server, two.marker, B, flush_cache=mode == "retract"))
    assert read_degree(server) == 1
    server.reconfigure(2)
    assert await post(session, server, "/continue_generation", {}) == 200
    for ids in tokens(await asyncio.gather(*work)):
        assert len(ids) == 200
        assert ids[0] == A and ids[-1] != A, "old weights at first, not the old ones at last"
    assert server.post("/flush_cache").status_code == 200
    await asyncio.to_thread(check_all_layouts, server, B)


@pytest.mark.parametrize("aborts", [False, True])
async def test_update_waits_for_running_requests_or_aborts_them(two, session, aborts):
    """SGLang lets running requests finish with the weights they began with, unless it is paused."""
    server = await asyncio.to_thread(two.start_in, 1)
    work = await hold(server, session, alive(3000 if aborts else 200), step=STEP, tp=2)
    update = asyncio.to_thread(update_from_disk, server, two.marker, B, abort_all_requests=aborts)
    update = asyncio.ensure_future(update)
    await server.set_schedule(session)
    check_success(await update)
    for answer in await asyncio.gather(*work):
        assert set(answer["output_ids"]) == {A}
        assert answer["meta_info"]["finish_reason"]["type"] == ("abort" if aborts else "length")
    await asyncio.to_thread(check_all_layouts, server, B)
