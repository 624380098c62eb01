"""verl's client of an engine in each training process, where the engine dies; engine and Ray are made up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from aiohttp import ClientResponseError
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError

from sglang_pat.integrations.verl import adapter

from .test_verl_fleet import remote

pytestmark = pytest.mark.integration


class Http:
    """verl's client of an engine, which fails; ``dies``: seconds until the engine's actor is known to be dead."""

    def __init__(self, error: Exception | None, seconds: float = 0.0) -> None:
        self.error, self.seconds = error, seconds

    async def flush_cache(self) -> str:
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return "flushed"


def make_surviving(http: Http, dies: float | None, lives: list[str] | None = None) -> Any:
    async def live() -> None:
        if lives is not None:
            lives.append("waits")
        await asyncio.sleep(1e6 if dies is None else dies)
        raise ActorDiedError

    return adapter._Surviving(http, SimpleNamespace(live=SimpleNamespace(remote=live)))


@pytest.mark.parametrize(
    ("http", "dies", "result"),
    [
        (Http(None), None, "flushed"),
        (Http(OSError("reset")), 0.05, None),
        (Http(None, seconds=60), 0.01, None),
        (Http(OSError("reset")), None, OSError),
        (Http(ClientResponseError(None, (), status=400)), None, ClientResponseError),
        (Http(ClientResponseError(None, (), status=500)), 0.05, None),
    ],
)
def test_calls_to_an_engine_that_dies_return_nothing(monkeypatch, http, dies, result):
    monkeypatch.setattr(adapter, "DYING_SECONDS", 0.2)

    async def run() -> Any:
        return await make_surviving(http, dies).flush_cache()

    if isinstance(result, type):
        with pytest.raises(result):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == result


@pytest.mark.parametrize("known", [True, False], ids=["ray-knows-its-name", "ray-does-not"])
def test_all_weights_are_taken_where_an_engine_has_died_before(monkeypatch, known):
    # Else the other ranks of the trainer would wait for ever in its broadcast.

    async def get_server_address() -> None:
        raise ActorDiedError

    def find(name: str) -> Any:
        if not known:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return SimpleNamespace(get_server_address=SimpleNamespace(remote=get_server_address))

    async def send(engine: Any, **_: Any) -> None:
        await engine.update_weights_from_tensor()

    one = adapter.SurvivingAdapter.__new__(adapter.SurvivingAdapter)
    one._engine, one._pd_role, one._has_server, one.replica_rank, one.node_rank = None, None, True, 0, 0
    one.rollout_rank, one.device_mesh = 0, {"infer_tp": SimpleNamespace(get_local_rank=lambda: 0)}
    one.sleep_level, bucket = 2, {"update_weights_bucket_megabytes": 1}
    one.config = OmegaConf.create({"free_cache_engine": True, "checkpoint_engine": bucket})
    model = dict(hf_config=SimpleNamespace(model_type="llama"), local_path="", trust_remote_code=False)
    one.model_config = SimpleNamespace(**model)
    monkeypatch.setattr(adapter.sglang_rollout, "AsyncHttpServerAdapter", lambda **_: "client of the next engine")
    monkeypatch.setattr(ray, "get_actor", find)
    monkeypatch.setattr(adapter.sglang_rollout, "sgl_update_weights", send)
    monkeypatch.setattr(adapter.sglang_rollout, "_to_ipc_device", lambda tensor: tensor)
    weights = ((str(number), torch.zeros(4)) for number in range(3))

    async def update() -> None:
        await one.resume(["weights"])
        await one.update_weights(weights, global_steps=1)
        await one.release()

        assert next(weights, None) is None
        monkeypatch.setattr(ray, "get_actor", lambda name: SimpleNamespace(get_server_address=remote(lambda: ("a", 1))))
        await one._init_server_adapter()

    asyncio.run(update())
    assert one._engine == "client of the next engine"


def test_an_engine_is_asked_once_whether_it_lives():
    """Ray keeps each such question, and who asks, until the actor dies."""
    lives: list[str] = []

    async def run() -> None:
        surviving = make_surviving(Http(None), None, lives)
        for _ in range(3):
            assert await surviving.flush_cache() == "flushed"

    asyncio.run(run())
    assert lives == ["waits"]
