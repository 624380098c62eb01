"""The linear layers of a decode step on views of the base weights, beside the same on copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from sglang_pat.acceptance import kernels
from sglang_pat.acceptance.bench import Bench
from sglang_pat.acceptance.results import Result
from sglang_pat.cpu import shim
from sglang_pat.memory.shapes import ModelShape

LAYERS = 4
"""That are measured: so many that their weights do not stay in a cache."""
DEGREES, BATCHES = (2, 4, 8), (1, 8, 64)
"""One rank's part is measured, so degrees need no more GPUs than one."""


def views(bench: Bench) -> Result:
    """What the linear layers of a decode step take on views of the base weights, beside copies of them."""
    torch.set_num_threads(1)
    shim.ensure()
    shape, dtype = bench.model, torch.bfloat16 if bench.device == "cuda" else torch.float32
    degrees = [tp for tp in DEGREES if shape.heads % tp == 0 and shape.intermediate % tp == 0]
    found = [measure(shape, tp, batch, bench.device, dtype, repeats=20) for tp in degrees for batch in BATCHES]
    rows = [["tp", "requests", "copies, ms", "views, ms", "views / copies"]]
    for row in found:
        times = (f"{row[way] * 1e3:.3f}" for way in ("copies_seconds", "views_seconds"))
        rows.append([str(row["tp"]), str(row["batch"]), *times, f"{_compute_ratio(row):.2f}"])
    if bench.device == "cuda":
        torch.cuda.empty_cache()  # for the engines
    lone = [_compute_ratio(row) for row in found if row["batch"] == 1]
    line = f"{bench.large.name}, one request: views take {min(lone):.2f} to {max(lone):.2f} of the time of copies"
    return Result(verdict="measured", line=line, rows=rows, figures={"rows": found})


def _compute_ratio(row: dict[str, float]) -> float:
    return row["views_seconds"] / row["copies_seconds"]


@dataclass
class Linear:
    """What rank 0 of a layout multiplies: parts of a base weight, ``[out, in]``, as views and as one copy."""

    parts: list[torch.Tensor]
    copy: torch.Tensor
    given: torch.Tensor
    """``[batch, in]``."""

    def on_views(self) -> torch.Tensor:
        if len(self.parts) == 1:
            return linear(self.given, self.parts[0])
        from sglang_pat.host.layers import PiecewiseLinear  # with it comes SGLang

        method = PiecewiseLinear()
        method.set_pieces(self.parts, None)
        return method.apply(torch.nn.Module(), self.given)

    def on_copy(self) -> torch.Tensor:
        return linear(self.given, self.copy)


def build_layer(shape: ModelShape, tp: int, batch: int, device: str, dtype: torch.dtype) -> list[Linear]:
    """A layer's four products (q, k and v; output; gate and up; down) in degree ``tp``, from base shards of tp1."""
    heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
    inner, dim = shape.intermediate // tp, shape.head_dim

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype) * 0.02

    def made(base: torch.Tensor, parts: list[torch.Tensor]) -> Linear:
        given = torch.randn(batch, parts[0].shape[1], device=device, dtype=dtype)
        return Linear(parts, torch.cat(parts).clone(memory_format=torch.contiguous_format), given)

    qkv = weight((shape.heads + 2 * shape.kv_heads) * dim, shape.hidden)
    q, k, v = qkv.split([shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim])
    output = weight(shape.hidden, shape.heads * dim)
    gate, up = weight(2 * shape.intermediate, shape.hidden).chunk(2)
    down = weight(shape.hidden, shape.intermediate)
    return [
        made(qkv, [q[: heads * dim], k[: kv_heads * dim], v[: kv_heads * dim]]),
        made(output, [output[:, : heads * dim]]),
        made(gate, [gate[:inner], up[:inner]]),
        made(down, [down[:, :inner]]),
    ]


def measure(shape: ModelShape, tp: int, batch: int, device: str, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Seconds of all linear layers of a step, ``views_seconds`` and ``copies_seconds``; on a GPU as CUDA graphs."""
    layers = min(LAYERS, shape.layers)
    made = [product for _ in range(layers) for product in build_layer(shape, tp, batch, device, dtype)]
    ways: list[Callable[[], object]] = [
        lambda: [product.on_views() for product in made],
        lambda: [product.on_copy() for product in made],
    ]
    if device == "cuda":
        ways = [capture_graph(way) for way in ways]
    views, copies = (seconds * shape.layers / layers for seconds in kernels.time_calls(device, *ways, repeats=repeats))
    return {"tp": tp, "batch": batch, "views_seconds": views, "copies_seconds": copies}


def capture_graph(call: Callable[[], object]) -> Callable[[], object]:
    """As a CUDA graph: what is launched counts as in a decode step, not what Python takes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # makes handles and workspaces, which a capture must not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
