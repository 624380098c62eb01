"""Three ways to send weights to an engine, and what it says afterwards; no test of its own.

Marker models say which weights they hold, and whether all of them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sglang_pat.testing.ports import find_free_port
from sglang_pat.testing.server import Server

from .marker_models import make_marker_state_dict
from .streams import GREEDY

A, B, C, D, E = 100, 200, 300, 400, 450
"""Tokens that the marker models say."""

GROUP = "marker_update"


def list_degrees(server: Server) -> list[int]:
    return [layout["tp"] for layout in server.status()["candidates"]]


def read_degree(server: Server) -> int:
    return server.status()["layout"]["tp"]


def make_body(seed: int, tokens: int) -> dict[str, Any]:
    return {"input_ids": [seed, 8, 9, 10], "sampling_params": GREEDY | {"max_new_tokens": tokens}}


def say(server: Server, count: int = 0, tokens: int = 6) -> list[set[int]]:
    """What ``count`` requests (default: two for each rank) say; the prompts are the same every time,
    so that values left in a cache would be found out."""
    count = count or 2 * max(list_degrees(server))
    return [set(answer["output_ids"]) for answer in server.generate([make_body(50 + i, tokens) for i in range(count)])]


def visit_layouts(server: Server) -> Iterator[int]:
    """Enter every layout, from below and from above; the degree of each."""
    up = list_degrees(server)
    for tp in [*up, *reversed(up[:-1])]:
        server.reconfigure(tp)
        yield tp


def check_all_layouts(server: Server, token: int) -> None:
    """Every layout generates with the weights of ``token``."""
    for tp in visit_layouts(server):
        said = say(server)
        assert said == [{token}] * len(said), f"tp={tp} says {said}, the weights are those of {token}"


# -- three ways to send weights -------------------------------------------------------------------------


def update_from_disk(server: Server, marker, token: int, **fields: Any) -> Any:
    return server.post("/update_weights_from_disk", {"model_path": str(marker(token))} | fields)


def serialize(named: Any) -> str:
    """The tensors as an RL framework in another process tree sends them."""
    from sglang_pat.cpu import shim

    shim.ensure()
    import torch.multiprocessing
    from sglang.srt.utils import MultiprocessingSerializer

    from sglang_pat.host.fixes.shared_memory import retry_late

    torch.multiprocessing.set_sharing_strategy("file_system")
    return retry_late(MultiprocessingSerializer.serialize)(named, output_str=True)


def flatten(named: Any) -> Any:
    """These tensors as one, as most frameworks send them, for :func:`serialize`."""
    serialize([])  # installs the shim, without which SGLang does not import here
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(named))
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def update_from_tensor(server: Server, token: int | list[int], ranks: int, **fields: Any) -> Any:
    """One serialized item for each physical rank; ``token`` may name another one for each."""
    tokens = token if isinstance(token, list) else [token] * ranks
    states = [list(make_marker_state_dict(one).items()) for one in tokens]
    items = [serialize(state) for state in states]
    return server.post("/update_weights_from_tensor", {"serialized_named_tensors": items} | fields)


def join_group(port: int, ranks: int) -> Any:
    """The update group of a trainer, its rank 0, and so many ranks of an engine."""
    from sglang_pat.cpu import shim

    shim.ensure()
    from sglang.srt.utils import init_custom_process_group

    return init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=ranks + 1, rank=0, group_name=GROUP
    )


def describe_group(port: int, ranks: int) -> dict[str, Any]:
    """The body of ``/init_weights_update_group``."""
    body = dict(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=ranks + 1)
    return body | dict(group_name=GROUP, backend="gloo")


class Trainer:
    """Rank 0 of an update group of which the engine's N ranks are 1 .. N."""

    def __init__(self, server: Server, ranks: int) -> None:
        self.server, port = server, find_free_port()
        answer = self._beside("/init_weights_update_group", describe_group(port, ranks))
        self.group = join_group(port, ranks)
        check_success(answer())

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
        check_success(self.broadcast(make_marker_state_dict(token), **fields))

    def close(self) -> None:
        import torch.distributed as dist

        response = self.server.post("/destroy_weights_update_group", {"group_name": GROUP})
        assert response.status_code == 200 and response.json()["success"], response.text
        dist.destroy_process_group(self.group)


def check_success(response: Any) -> None:
    assert response.status_code == 200 and response.json()["success"], response.text


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
        check_success(update_from_disk(server, self.marker, A))
        server.reconfigure(tp)
        said = say(server)
        assert said == [{A}] * len(said)
        return server


def main(port: str, ranks: str) -> None:
    """A trainer that dies once it has sent tensors of the shapes on its stdin."""
    import torch
    import torch.distributed as dist

    group = join_group(int(port), int(ranks))
    for shape in json.load(sys.stdin):
        dist.broadcast(torch.ones(shape), src=0, group=group)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
