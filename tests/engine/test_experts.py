"""Mixtures of experts: new weights reach the experts of every layout.

Which weights an engine has is seen by what it says, beside transformers with the same weights.  That switches change no
token: ``test_same_tokens.py``, whose servers these are; that one that fails leaves them as they were:
``test_faults.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sglang_pat.testing.server import Server
from sglang_pat.testing.smollm2 import load_transformers

from .conftest import long, make_model
from .streams import body, tokens
from .weight_updates import Trainer, check_success, flatten, read_degree, serialize, visit_layouts

BODIES = [body(300 + i, 24) for i in range(6)]


def make_two(kind: str) -> list[Path]:
    """Models that differ in all weights."""
    return [make_model(kind), make_model(kind, f"{kind}-1", seed=1)]


def load(folder: Path) -> Any:
    """transformers' model."""
    return load_transformers().AutoModelForCausalLM.from_pretrained(folder)


def generate(model: Any) -> list[list[int]]:
    """What transformers' model says to :data:`BODIES`."""
    import torch

    prompts = torch.tensor([one["input_ids"] for one in BODIES])
    answers = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    return answers[:, prompts.shape[1] :].tolist()


@pytest.fixture(scope="session")
def folders() -> list[Path]:
    return make_two("qwen3_moe")


@pytest.fixture(scope="session")
def said(folders) -> list[list[list[int]]]:
    """What transformers makes of each model."""
    found = [generate(load(folder)) for folder in folders]
    assert not any(one == other for one, other in zip(*found, strict=True))
    return found


@pytest.fixture
def server(servers, folders, said) -> Server:
    """A server of two ranks with the first weights, in its tail."""
    server = servers.adaptive(folders[0], 2)
    if tokens(server.generate(BODIES)) != said[0]:
        check_success(server.post("/update_weights_from_disk", {"model_path": str(folders[0])}))
    server.reconfigure(2)
    return server


def check_answers(server: Server, wanted: list[list[int]]) -> None:
    for tp in visit_layouts(server):
        assert tokens(server.generate(BODIES)) == wanted, f"tp={tp}"


def load_from_disk(server: Server, folder: Path) -> None:
    check_success(server.post("/update_weights_from_disk", {"model_path": str(folder)}))


def read_tensors(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def send_tensors(server: Server, state: dict[str, Any]) -> None:
    items = [serialize(list(state.items())) for _ in range(2)]
    check_success(server.post("/update_weights_from_tensor", {"serialized_named_tensors": items}))


def send_bucket(server: Server, state: dict[str, Any]) -> None:
    items = [serialize(flatten(state.items())) for _ in range(2)]
    body = {"serialized_named_tensors": items, "load_format": "flattened_bucket"}
    check_success(server.post("/update_weights_from_tensor", body))


def send_by_group(server: Server, state: dict[str, Any]) -> None:
    trainer = Trainer(server, 2)
    try:
        server.reconfigure(2)
        check_success(trainer.broadcast(state))
    finally:
        trainer.close()


ROUTES = [send_tensors, send_bucket, send_by_group]


@pytest.mark.parametrize("update", [load_from_disk, *ROUTES])
def test_new_weights_reach_the_experts_of_every_layout(server, folders, said, update):
    update(server, folders[1] if update is load_from_disk else read_tensors(folders[1]))
    assert read_degree(server) == 1
    check_answers(server, said[1])


@pytest.mark.parametrize("kind", ["qwen3_moe", long("qwen2_moe"), long("mixtral")])
def test_weights_by_the_names_of_a_trainer(servers, tmp_path, kind):
    """transformers has all experts of a layer in one tensor, and its Mixtral other names than the checkpoint."""
    folders = make_two(kind)
    server, model, wanted = servers.adaptive(folders[0], 2), load(folders[1]), generate(load(folders[1]))
    state = model.state_dict()
    assert state.keys() != read_tensors(folders[1]).keys()

    def update_from_disk(server: Server, state: dict[str, Any]) -> None:
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        load_from_disk(server, tmp_path)

    for update in (*ROUTES, update_from_disk):
        load_from_disk(server, folders[0])
        assert tokens(server.generate(BODIES)) != wanted
        update(server, state)
        check_answers(server, wanted)
    for fewer in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{fewer}"
        items = [serialize([*state.items(), (name, state[name][1:])]) for _ in range(2)]
        response = server.post("/update_weights_from_tensor", {"serialized_named_tensors": items})
        must = f"{name} has the shape {[7, *state[name].shape[1:]]}, must be of 8 experts"
        assert response.status_code == 400 and response.json()["message"].endswith(must), response.text
    check_answers(server, wanted)
