"""Updates in other forms; a request that does not fit is refused as a whole, and a trainer may die.  On two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from typing import Any

import pytest

from sglang_pat.host.adapter import FOLDER
from sglang_pat.testing.ports import find_free_port
from sglang_pat.testing.prefork import popen

from .marker_models import make_marker_state_dict
from .weight_updates import (
    GROUP,
    A,
    B,
    C,
    D,
    Trainer,
    check_all_layouts,
    check_success,
    describe_group,
    flatten,
    say,
    serialize,
    update_from_tensor,
)


def test_tensors_are_addressed_by_physical_rank(two):
    """Each rank is a replica of TP rank 0 in the base layout; its item is still the one of its own number."""
    server = two.start_in(2)
    check_success(update_from_tensor(server, [B, C], 2))
    assert sorted({tuple(tokens) for tokens in say(server, count=8, tokens=100)}) == [(B,), (C,)]
    check_success(update_from_tensor(server, D, 2))
    check_all_layouts(server, D)


def test_update_that_fails_changes_nothing(two, tmp_path):
    server = two.start_in(2)
    version = server.status()["weight_version"]
    body = {"model_path": str(tmp_path / "missing"), "weight_version": "no"}
    response = server.post("/update_weights_from_disk", body)
    assert response.status_code == 400 and not response.json()["success"]
    assert server.status()["weight_version"] == version
    check_all_layouts(server, A)


def wrong(state: dict[str, Any], what: str) -> dict[str, Any]:
    """An update that is right until its last tensor."""
    import torch

    half = dict(list(state.items())[: len(state) // 2])
    last = {
        # SGLang takes the rows that it needs of it, and says nothing.
        "rows": ("model.layers.1.self_attn.q_proj.weight", torch.zeros(1024, 64)),
        "name": ("model.layers.1.self_attn.query.weight", torch.zeros(64, 64)),
    }
    return half | dict([last[what]])


WRONG = {
    "rows": "q_proj.weight has the shape [1024, 64], must be [64, 64]",
    "name": "the model has no tensor 'model.layers.1.self_attn.query.weight'",
}
"""What the answer says; of more kinds ``tests/contract/test_shards_of_models.py``."""


REFUSED = "weight update refused, no tensor of this request was written; send the whole update again"


def check_refused(response: Any, said: str) -> None:
    assert response.status_code == 400, response.text
    message = response.json()["message"]
    assert message.startswith(f"{REFUSED}: ") and said in message
    assert "\n" not in message


@pytest.mark.parametrize("what", WRONG)
def test_update_that_does_not_fit_is_refused_as_a_whole(two, what):
    """Tensors in shared memory, and in one bucket; no rank takes any of them."""
    server = two.start_in(2)
    named = list(wrong(make_marker_state_dict(B), what).items())
    for tensors, more in ((named, {}), (flatten(named), {"load_format": "flattened_bucket"})):
        body = {"serialized_named_tensors": [serialize(tensors)] * two.ranks} | more
        check_refused(server.post("/update_weights_from_tensor", body), WRONG[what])
    check_all_layouts(server, A)


def test_what_came_before_a_request_that_is_refused_stays(two):
    """The engine has neither the old weights nor the new ones then, until the whole update comes again."""
    server = two.start_in(2)
    state = list(make_marker_state_dict(B).items())
    first, second = state[: len(state) // 2], state[len(state) // 2 :]
    second += list(wrong(dict(second), "name").items())[-1:]

    def send(named: list[tuple[str, Any]]) -> Any:
        items = [serialize(named)] * two.ranks
        return server.post("/update_weights_from_tensor", {"serialized_named_tensors": items})

    check_success(send(first))
    half = say(server)
    assert not {A, B} & set.union(*half)
    check_refused(send(second), WRONG["name"])
    assert say(server) == half, "none of the second request was written"
    check_success(update_from_tensor(server, B, two.ranks))
    check_all_layouts(server, B)


def test_update_that_one_rank_cannot_take_is_refused_by_all(two):
    server = two.start_in(2)
    state = make_marker_state_dict(B)
    right, bad = list(state.items()), list(wrong(state, "name").items())
    for items, said in (
        ([serialize(right), serialize(bad)], WRONG["name"]),
        ([serialize(bad), serialize(right)], WRONG["name"]),
        ([serialize(right)], "1 items for 2 ranks, must be one for each"),
        ([serialize(right), "bm9ib2R5"], "UnpicklingError"),
    ):
        check_refused(server.post("/update_weights_from_tensor", {"serialized_named_tensors": items}), said)
        assert say(server) == [{A}] * 4
    check_all_layouts(server, A)
    check_success(update_from_tensor(server, C, two.ranks))
    check_all_layouts(server, C)


def test_broadcast_that_does_not_fit_is_received_and_refused(two):
    """The trainer is not kept waiting, and its next update is taken."""
    server = two.start_in(2)
    trainer = Trainer(server, two.ranks)
    try:
        for what, said in WRONG.items():
            check_refused(trainer.broadcast(wrong(make_marker_state_dict(B), what)), said)
        check_all_layouts(server, A)
        trainer.send(C)
        check_all_layouts(server, C)
    finally:
        trainer.close()


def test_trainer_that_dies_in_an_update_leaves_the_old_weights(two):
    """Half of the tensors have been sent when its process is gone."""
    server, port = two.start_in(2), find_free_port()
    argv = [str(port), str(two.ranks)]
    trainer = popen(two.servers.prefork, "tests.engine.weight_updates", argv, os.environ, stdin=subprocess.PIPE)
    try:
        check_success(server.post("/init_weights_update_group", describe_group(port, two.ranks)))
        state, answers = make_marker_state_dict(B), []
        shapes = [list(tensor.shape) for tensor in state.values()]
        body = dict(names=list(state), dtypes=["float32"] * len(state), shapes=shapes, group_name=GROUP)
        post = threading.Thread(target=lambda: answers.append(server.post("/update_weights_from_distributed", body)))
        post.start()
        with trainer.stdin as shapes_of_half:
            json.dump(shapes[: len(shapes) // 2], shapes_of_half)
        trainer.wait(200)
        post.join(200)
        assert answers, "the engine waits for ever"
        old = FOLDER == "v0_5_12"
        check_refused(answers[0], "Failed to update parameter online" if old else "Failed to receive weights")
        check_success(server.post("/destroy_weights_update_group", {"group_name": GROUP}))
        check_all_layouts(server, A)
        other = Trainer(server, two.ranks)
        other.send(C)
        check_all_layouts(server, C)
        other.close()
    finally:
        trainer.kill()
