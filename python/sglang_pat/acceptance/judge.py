"""Layers of a judge that come from host memory, beside the same on the device: equal results, and their times."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from sglang_pat.acceptance import kernels
from sglang_pat.acceptance.bench import Bench
from sglang_pat.acceptance.results import Result
from sglang_pat.cpu import shim
from sglang_pat.memory.shapes import ModelShape
from stream_layers.judge_memory import order_layers

LAYERS = 8
STREAMED = (3, 4, 8)
TOKENS = {"cpu": (1, 64), "cuda": (1, 2048, 8192, 16384)}
"""Tokens of a step by device; a step of 1 is one of decode."""


class DecoderBlock(torch.nn.Module):
    """The products of a decoder's layer, without its attention: what nothing but computation hides copies behind."""

    def __init__(self, shape: ModelShape, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._queries = shape.heads * shape.head_dim
        heads = shape.heads + 2 * shape.kv_heads

        def make(rows: int, columns: int) -> torch.nn.Parameter:
            drawn = torch.randn(rows, columns, device=device, dtype=dtype) * 0.02
            return torch.nn.Parameter(drawn, requires_grad=False)

        self.qkv = make(heads * shape.head_dim, shape.hidden)
        self.output = make(shape.hidden, self._queries)
        self.gate_up = make(2 * shape.intermediate, shape.hidden)
        self.down = make(shape.hidden, shape.intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(F.linear(F.rms_norm(x, x.shape[-1:]), self.qkv)[:, : self._queries], self.output)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:]), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


def judge(bench: Bench) -> Result:
    """Layers that are streamed from host memory compute what resident ones do, and how much of the copies they hide."""
    torch.set_num_threads(1)
    shim.ensure()
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    figures = measure(bench.model, bench.device, dtype, TOKENS[bench.device], repeats=5)
    if bench.device == "cuda":  # memory for the engines
        gc.collect()
        torch.cuda.empty_cache()
    rows = [["tokens", "resident, ms", *(f"{count} of {LAYERS} streamed" for count in STREAMED)]]
    for tokens, row in figures["steps"].items():
        ratios = (f"{row[count]['seconds'] / row[0]['seconds']:.2f} times" for count in STREAMED)
        rows.append([str(tokens), f"{row[0]['seconds'] * 1e3:.2f}", *ratios])
    equal = all(one["equal"] for row in figures["steps"].values() for one in row.values())
    line = f"{bench.large.name}: {'equal in every bit' if equal else 'NOT EQUAL'}"
    if bench.device == "cuda":  # a CPU copies and computes in turn
        most = TOKENS["cuda"][-1]
        row = figures["steps"][most]
        ratio = row[STREAMED[1]]["seconds"] / row[0]["seconds"]
        line += (
            f"; a layer is copied in {figures['copy_seconds'] * 1e3:.2f} ms; with half of the layers streamed a step "
            f"of {most:,} tokens takes {ratio:.2f} times as long"
        )
    return Result(verdict="passed" if equal else "failed", line=line, rows=rows, figures=figures)


def measure(
    shape: ModelShape, device: str, dtype: torch.dtype, tokens: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    """Steps of :data:`LAYERS` layers, on a GPU as CUDA graphs.  More and more of the same layers are streamed.

    Returns:
        ``copy_seconds`` of a layer; ``steps``: by tokens, by the number of streamed layers (0: resident), ``seconds``
        and whether the result is that of resident layers (``equal``).
    """
    from stream_layers.layers import HostLayer, StreamedLayers

    resident = [DecoderBlock(shape, device, dtype) for _ in range(LAYERS)]
    inputs = {count: torch.randn(count, shape.hidden, device=device, dtype=dtype) for count in tokens}
    outputs = {count: run_layers(resident, x) for count, x in inputs.items()}
    steps: dict[int, dict[int, dict[str, Any]]] = {count: {} for count in tokens}
    moved = StreamedLayers(order_layers(0, LAYERS), 0, device)
    layers = moved.wrap_modules(copy.deepcopy(resident))
    moved.post_init()
    for streamed in (0, *STREAMED):
        moved.stream(streamed)
        for count, x in inputs.items():
            out = torch.empty_like(x)
            step = partial(lambda layers, x, out: out.copy_(run_layers(layers, x)), layers, x, out)
            if device == "cuda":
                step = kernels.capture_graph(step)
            (seconds,) = kernels.time_calls(device, step, repeats=repeats)
            steps[count][streamed] = {"seconds": seconds, "equal": torch.equal(out, outputs[count])}
    layer = HostLayer(resident[0])
    place = torch.empty_like(layer.data, device=device)
    (copy_seconds,) = kernels.time_calls(device, lambda: place.copy_(layer.data, non_blocking=True), repeats=repeats)
    return {"copy_seconds": copy_seconds, "bytes": layer.data.nbytes, "steps": steps}


def run_layers(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x
