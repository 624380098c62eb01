"""New weights reach every layout: on two ranks, on four, and in reshard mode."""

from __future__ import annotations

import pytest

from sglang_pat.testing import models

from .weight_updates import A, B, C, D, E, Setup, Trainer, all_layouts_say, from_disk, from_tensor, layout, succeeded

SETUPS = {
    "2ranks": (2,),
    "4ranks-as-on-cuda": (4, "as on CUDA"),
    "reshard": (2, "--pat-weights", "reshard"),
}


@pytest.fixture(scope="module", params=SETUPS)
def setup(request, servers, marker) -> Setup:
    return Setup(servers, marker, *SETUPS[request.param])


@pytest.fixture(params=["base", "tail"])
def start(request, setup) -> int:
    """Degree in force when the update arrives."""
    return 1 if request.param == "base" else setup.ranks


def test_update_from_disk(setup, start):
    server = setup.start_in(start)
    succeeded(from_disk(server, setup.marker, B, weight_version="disk"))
    assert layout(server) == 1
    assert server.status()["weight_version"] == "disk"
    assert server.get("/model_info").json()["weight_version"] == "disk"
    all_layouts_say(server, B)


def test_update_from_tensor(setup, start):
    server = setup.start_in(start)
    succeeded(from_tensor(server, C, setup.ranks, weight_version="tensor"))
    assert layout(server) == 1
    assert server.status()["weight_version"] == "tensor"
    all_layouts_say(server, C)


def test_update_from_distributed(setup, start):
    server = setup.start_in(start)
    trainer = Trainer(server, setup.ranks)
    try:
        assert layout(server) == 1
        server.reconfigure(start)
        trainer.send(D, weight_version="distributed")
        assert layout(server) == 1
        assert server.status()["weight_version"] == "distributed"
        all_layouts_say(server, D)
        server.reconfigure(start)
        trainer.send(E)
        all_layouts_say(server, E)
    finally:
        trainer.close()


def test_release_and_resume_memory(setup, start):
    server = setup.start_in(start)
    assert server.post("/release_memory_occupation", {}).status_code == 200
    assert layout(server) == 1
    refused = server.post("/pat/reconfigure", {"tp": 2})
    assert refused.status_code == 409 and "resume it first" in refused.json()["error"]["message"]
    assert server.post("/resume_memory_occupation", {}).status_code == 200
    all_layouts_say(server, A)
    server.reconfigure(start)
    for tag in ("kv_cache", "weights"):
        assert server.post("/release_memory_occupation", {"tags": [tag]}).status_code == 200
    for tag in ("weights", "kv_cache"):
        assert server.post("/resume_memory_occupation", {"tags": [tag]}).status_code == 200
    succeeded(from_disk(server, setup.marker, B))
    all_layouts_say(server, B)


def test_get_weights_by_name(setup, start):
    server = setup.start_in(start)
    name = "model.layers.0.mlp.down_proj.weight"
    for token in (A, B):
        wanted = models.marker_state_dict(token)[name][:3].tolist()
        got = server.post("/get_weights_by_name", {"name": name, "truncate_size": 3}).json()
        assert got == [pytest.approx(row) for row in wanted]
        server.reconfigure(start)
        succeeded(from_disk(server, setup.marker, B))
        server.reconfigure(start)
