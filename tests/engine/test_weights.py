"""New weights reach every layout: marker models say which weights they hold, and whether all of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sglang_pat.testing import models
from sglang_pat.testing.ports import free_port
from sglang_pat.testing.server import Server

A, B, C, D, E = 100, 200, 300, 400, 450
"""Tokens that the marker models say."""

ALIVE = 200
"""Tokens of a request that is alive in a test; its engine holds it at step :data:`STEP`."""
STEP = 30

GROUP = "marker_update"


def degrees(server: Server) -> list[int]:
    return [layout["tp"] for layout in server.status()["candidates"]]


def layout(server: Server) -> int:
    return server.status()["layout"]["tp"]


def body(seed: int, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": [seed, 8, 9, 10], "sampling_params": sampling}


def say(server: Server, count: int = 0, tokens: int = 6) -> list[set[int]]:
    """What ``count`` requests (default: two for each rank) say; the prompts are the same every time,
    so that values left in a cache would be found out."""
    count = count or 2 * max(degrees(server))
    return [set(answer["output_ids"]) for answer in server.generate([body(50 + i, tokens) for i in range(count)])]


def all_layouts_say(server: Server, token: int) -> None:
    """Every layout, entered from below and from above, generates with the weights of ``token``."""
    up = degrees(server)
    for tp in [*up, *reversed(up[:-1])]:
        server.reconfigure(tp)
        said = say(server)
        assert said == [{token}] * len(said), f"tp={tp} says {said}, the weights are those of {token}"


# -- three ways to send weights -------------------------------------------------------------------------


def from_disk(server: Server, marker, token: int, **fields: Any) -> Any:
    return server.post("/update_weights_from_disk", {"model_path": str(marker(token))} | fields)


def serialized(named: Any) -> str:
    """As an RL framework in another process tree sends it."""
    from sglang_pat.sglang import cpu_shim

    cpu_shim.install()
    import torch.multiprocessing
    from sglang.srt.utils import MultiprocessingSerializer

    from sglang_pat.sglang.rank import updates

    torch.multiprocessing.set_sharing_strategy("file_system")
    return updates.patiently(lambda: MultiprocessingSerializer.serialize(named, output_str=True))


def from_tensor(server: Server, token: int | list[int], ranks: int, **fields: Any) -> Any:
    """One serialized item for each physical rank; ``token`` may name another one for each."""
    tokens = token if isinstance(token, list) else [token] * ranks
    states = [list(models.marker_state_dict(one).items()) for one in tokens]
    items = [serialized(state) for state in states]
    return server.post("/update_weights_from_tensor", {"serialized_named_tensors": items} | fields)


class Trainer:
    """Rank 0 of an update group of which the engine's N ranks are 1 .. N."""

    def __init__(self, server: Server, ranks: int) -> None:
        from sglang_pat.sglang import cpu_shim

        cpu_shim.install()
        from sglang.srt.utils import init_custom_process_group

        self.server, port = server, free_port()
        body = dict(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=ranks + 1)
        body |= dict(group_name=GROUP, backend="gloo")
        answer = self._beside("/init_weights_update_group", body)
        self.group = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=ranks + 1, rank=0, group_name=GROUP
        )
        succeeded(answer())

    def _beside(self, path: str, body: Any) -> Callable[[], Any]:
        """Post in a thread; the caller takes part in the collective meanwhile."""
        result: list[Any] = []
        thread = threading.Thread(target=lambda: result.append(self.server.post(path, body, timeout=500)))
        thread.start()

        def wait() -> Any:
            thread.join(60)
            return result[0]

        return wait

    def broadcast(self, state: dict[str, Any], **fields: Any) -> Any:
        """Send these tensors; returns the server's answer."""
        import torch.distributed as dist

        body = dict(
            names=list(state),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in state.values()],
            shapes=[list(tensor.shape) for tensor in state.values()],
            group_name=GROUP,
        )
        answer = self._beside("/update_weights_from_distributed", body | fields)
        for tensor in state.values():
            dist.broadcast(tensor, src=0, group=self.group)
        return answer()

    def send(self, token: int, **fields: Any) -> None:
        succeeded(self.broadcast(models.marker_state_dict(token), **fields))

    def close(self) -> None:
        import torch.distributed as dist

        response = self.server.post("/destroy_weights_update_group", {"group_name": GROUP})
        assert response.status_code == 200 and response.json()["success"], response.text
        dist.destroy_process_group(self.group)


def succeeded(response: Any) -> None:
    assert response.status_code == 200 and response.json()["success"], response.text


# -- the tests: on two ranks, on four, and in reshard mode ------------------------------------------------


class Setup:
    """A server with marker model A, and how many ranks it has."""

    def __init__(self, servers, marker, ranks: int, *flags: str) -> None:
        self.servers, self.marker, self.ranks, self.flags = servers, marker, ranks, flags

    @property
    def server(self) -> Server:
        if self.flags == ("as on CUDA",):
            return self.servers.as_on_cuda(self.marker(A), self.ranks)
        return self.servers.adaptive(self.marker(A), self.ranks, *self.flags)

    def start_in(self, tp: int) -> Server:
        """The server, with the weights of A, in layout ``tp``."""
        server = self.server
        succeeded(from_disk(server, self.marker, A))
        server.reconfigure(tp)
        said = say(server)
        assert said == [{A}] * len(said)
        return server


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


# -- two ranks only ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(servers, marker) -> Setup:
    return Setup(servers, marker, 2)


def test_tensors_are_addressed_by_physical_rank(two):
    """In the base layout each rank is a replica of TP rank 0; its item is still the one of its own number."""
    server = two.start_in(2)
    succeeded(from_tensor(server, [B, C], 2))
    assert sorted({tuple(tokens) for tokens in say(server, count=8, tokens=100)}) == [(B,), (C,)]
    succeeded(from_tensor(server, D, 2))
    all_layouts_say(server, D)


def test_flattened_bucket(two):
    server = two.start_in(2)
    serialized([])  # installs the shim, without which SGLang does not import here
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    state = list(models.marker_state_dict(E).items())
    half = len(state) // 2
    for part in (state[:half], state[half:]):
        bucket = FlattenedTensorBucket(named_tensors=part)
        item = serialized({"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()})
        body = {"serialized_named_tensors": [item, item], "load_format": "flattened_bucket"}
        succeeded(server.post("/update_weights_from_tensor", body))
    all_layouts_say(server, E)


def test_update_that_fails_changes_nothing(two, tmp_path):
    server = two.start_in(2)
    version = server.status()["weight_version"]
    body = {"model_path": str(tmp_path / "missing"), "weight_version": "no"}
    response = server.post("/update_weights_from_disk", body)
    assert response.status_code == 400 and not response.json()["success"]
    assert server.status()["weight_version"] == version
    all_layouts_say(server, A)


def wrong(state: dict[str, Any], what: str) -> dict[str, Any]:
    """An update that is right until its last tensor."""
    import torch

    half = dict(list(state.items())[: len(state) // 2])
    width = state["model.norm.weight"].shape[0]
    last = {
        "shape": ("model.norm.weight", torch.zeros(3)),
        "dimensions": ("model.norm.weight", torch.zeros(width, 1)),
        # SGLang takes the rows that it needs of it, and says nothing.
        "rows": ("model.layers.1.self_attn.q_proj.weight", torch.zeros(16 * width, width)),
        "vocabulary": ("lm_head.weight", torch.zeros(512, width)),
        "name": ("model.layers.1.self_attn.query.weight", torch.zeros(width, width)),
        "layer": ("model.layers.9.mlp.down_proj.weight", torch.zeros(width, width)),
    }
    return half | dict([last[what]])


WRONG = {
    "shape": "model.norm.weight has the shape [3], must be [64]",
    "dimensions": "model.norm.weight has the shape [64, 1], must be [64]",
    "rows": "q_proj.weight has the shape [1024, 64], must be [64, 64]",
    "vocabulary": "lm_head.weight has the shape [512, 64], must be [503, 64]",
    "name": "the model has no tensor 'model.layers.1.self_attn.query.weight'",
    "layer": "the model has no tensor 'model.layers.9.mlp.down_proj.weight'",
}
"""What the answer says."""


def refused(response: Any, said: str) -> None:
    assert response.status_code == 400, response.text
    message = response.json()["message"]
    assert message.startswith("weight update refused, all weights are as they were: ") and said in message
    assert "\n" not in message


@pytest.mark.parametrize("what", WRONG)
def test_update_that_does_not_fit_is_refused_as_a_whole(two, what):
    """Tensors in shared memory, and in one bucket; no rank takes any of them."""
    server = two.start_in(2)
    serialized([])
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    named = list(wrong(models.marker_state_dict(B), what).items())
    bucket = FlattenedTensorBucket(named_tensors=named)
    flat = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    for tensors, more in ((named, {}), (flat, {"load_format": "flattened_bucket"})):
        body = {"serialized_named_tensors": [serialized(tensors)] * two.ranks} | more
        refused(server.post("/update_weights_from_tensor", body), WRONG[what])
    all_layouts_say(server, A)


def test_update_that_one_rank_cannot_take_is_refused_by_all(two):
    server = two.start_in(2)
    state = models.marker_state_dict(B)
    right, bad = list(state.items()), list(wrong(state, "name").items())
    for items, said in (
        ([serialized(right), serialized(bad)], WRONG["name"]),
        ([serialized(bad), serialized(right)], WRONG["name"]),
        ([serialized(right)], "1 items for 2 ranks, must be one for each"),
        ([serialized(right), "bm9ib2R5"], "UnpicklingError"),
    ):
        refused(server.post("/update_weights_from_tensor", {"serialized_named_tensors": items}), said)
        assert say(server) == [{A}] * 4
    all_layouts_say(server, A)
    succeeded(from_tensor(server, C, two.ranks))
    all_layouts_say(server, C)


def test_broadcast_that_does_not_fit_is_received_and_refused(two):
    """The trainer is not kept waiting, and its next update is taken."""
    server = two.start_in(2)
    trainer = Trainer(server, two.ranks)
    try:
        for what, said in WRONG.items():
            refused(trainer.broadcast(wrong(models.marker_state_dict(B), what)), said)
        all_layouts_say(server, A)
        trainer.send(C)
        all_layouts_say(server, C)
    finally:
        trainer.close()


def test_trainer_that_dies_in_an_update_leaves_the_old_weights(two):
    """Half of the tensors have been sent when its process is gone."""
    server = two.start_in(2)
    port = free_port()
    script = [sys.executable, "-c", DYING, str(port), str(two.ranks + 1), GROUP]
    process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        state = models.marker_state_dict(B)
        group = dict(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=two.ranks + 1)
        succeeded(server.post("/init_weights_update_group", group | dict(group_name=GROUP, backend="gloo")))
        answers: list[Any] = []
        shapes = [list(tensor.shape) for tensor in state.values()]
        body = dict(names=list(state), dtypes=["float32"] * len(state), shapes=shapes, group_name=GROUP)
        post = threading.Thread(target=lambda: answers.append(server.post("/update_weights_from_distributed", body)))
        post.start()
        process.communicate(json.dumps(shapes[: len(shapes) // 2]), timeout=200)
        post.join(200)
        assert answers, "the engine waits for ever"
        refused(answers[0], "Failed to update parameter online")
        succeeded(server.post("/destroy_weights_update_group", {"group_name": GROUP}))
        all_layouts_say(server, A)
        trainer = Trainer(server, two.ranks)
        trainer.send(C)
        all_layouts_say(server, C)
        trainer.close()
    finally:
        process.kill()


DYING = """
import json, os, sys
import torch, torch.distributed as dist
port, ranks, name = sys.argv[1:]
from sglang_pat.sglang import cpu_shim
cpu_shim.install()
from sglang.srt.utils import init_custom_process_group
group = init_custom_process_group(
    backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=int(ranks), rank=0, group_name=name
)
for shape in json.load(sys.stdin):
    dist.broadcast(torch.ones(shape), src=0, group=group)
os._exit(1)
"""


async def decode_while_paused(server: Server, mode: str, act: Callable[[], Any]) -> list[dict[str, Any]]:
    """Four requests decode in the tail layout, are paused, ``act`` is called, and they go on to the end."""
    bodies = [body(70 + i, ALIVE) for i in range(4)]
    async with server.session() as session:
        await server.arm(session, {"tp": 2, "arrived": 4, "step": STEP, "hold": True})
        work = asyncio.ensure_future(server.generate_async(bodies))
        await server.reached(session)
        async with session.post(server.url + "/pause_generation", json={"mode": mode}) as response:
            assert response.status == 200
        await server.arm(session)
        await asyncio.to_thread(act)
        async with session.post(server.url + "/continue_generation", json={}) as response:
            assert response.status == 200
        return await work


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_update_with_requests_alive_in_the_tail(two, mode):
    server = two.start_in(1)

    def update() -> None:
        assert server.status()["requests"] == 4
        # Requests that are paused in place hold KV.
        succeeded(from_disk(server, two.marker, B, flush_cache=mode == "retract"))
        assert layout(server) == 1
        server.reconfigure(2)

    answers = asyncio.run(decode_while_paused(server, mode, update))
    for answer in answers:
        ids = answer["output_ids"]
        assert len(ids) == ALIVE
        assert ids[0] == A and ids[-1] != A, "old weights at first, not the old ones at last"
    assert server.post("/flush_cache?timeout=500").status_code == 200
    all_layouts_say(server, B)


def test_update_waits_for_running_requests(two):
    """Without a pause SGLang lets running requests finish with the weights they began with."""
    server = two.start_in(1)
    bodies = [body(90 + i, ALIVE) for i in range(4)]

    async def run() -> list[dict[str, Any]]:
        async with server.session() as session:
            await server.arm(session, {"tp": 2, "arrived": 4, "step": STEP, "hold": True})
            work = asyncio.ensure_future(server.generate_async(bodies))
            await server.reached(session)
            update = asyncio.ensure_future(asyncio.to_thread(from_disk, server, two.marker, B))
            await server.arm(session)
            succeeded(await update)
            return await work

    for answer in asyncio.run(run()):
        assert set(answer["output_ids"]) == {A} and len(answer["output_ids"]) == ALIVE
    assert layout(server) == 1
    all_layouts_say(server, B)


def test_abort_all_and_update_in_the_tail(two):
    server = two.start_in(1)
    bodies = [body(90 + i, 3000) for i in range(4)]

    async def run() -> list[dict[str, Any]]:
        async with server.session() as session:
            await server.arm(session, {"tp": 2, "arrived": 4, "step": STEP})
            work = asyncio.ensure_future(server.generate_async(bodies))
            await server.reached(session)
            succeeded(await asyncio.to_thread(lambda: from_disk(server, two.marker, B, abort_all_requests=True)))
            return await work

    for answer in asyncio.run(run()):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert set(answer["output_ids"]) <= {A}
    all_layouts_say(server, B)
