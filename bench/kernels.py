"""What layers take on views of the base weights, beside the same on copies: linear ones, and experts on a GPU.

    python bench/kernels.py [--quick] [--model Llama-3.1-8B|Qwen3-4B|Qwen3-0.6B] [--json FILE]

One rank's part of a layout is measured, in one process; on a GPU as CUDA graphs.  Experts are those of a layer of
Qwen3-30B-A3B.  That views and copies of experts give the same bits is what the acceptance checks (step ``experts``).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _bench
import torch
from torch.nn.functional import linear

from sglang_pat.acceptance import experts, kernels
from sglang_pat.cpu import shim
from sglang_pat.memory.shapes import ModelShape, read_config
from sglang_pat.testing import models

LAYERS = 4
"""Number of layers that are measured, enough that their weights do not stay in a cache."""
DEGREES, BATCHES = (2, 4, 8), (1, 8, 64)
WAYS = ("copies", "views", "gate and up: copy", "one launch", "two launches")


@dataclass
class Linear:
    """Product of rank 0 of a layout: parts of a base weight, ``[out, in]``, as views and as one copy."""

    parts: list[torch.Tensor]
    copy: torch.Tensor
    given: torch.Tensor
    """Input, ``[batch, in]``."""

    def on_views(self) -> torch.Tensor:
        if len(self.parts) == 1:
            return linear(self.given, self.parts[0])
        from sglang_pat.rank.weights import PiecewiseLinear  # with it comes SGLang

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


def time_linears(
    shape: ModelShape, tp: int, batch: int, device: str, dtype: torch.dtype, repeats: int
) -> dict[str, float]:
    """Seconds of all linear layers of a step, ``views_seconds`` and ``copies_seconds``; on a GPU as CUDA graphs."""
    layers = min(LAYERS, shape.layers)
    made = [product for _ in range(layers) for product in build_layer(shape, tp, batch, device, dtype)]
    ways: list[Callable[[], object]] = [
        lambda: [product.on_views() for product in made],
        lambda: [product.on_copy() for product in made],
    ]
    if device == "cuda":
        ways = [kernels.capture_graph(way) for way in ways]
    views, copies = (seconds * shape.layers / layers for seconds in kernels.time_calls(device, *ways, repeats=repeats))
    return {"tp": tp, "batch": batch, "views_seconds": views, "copies_seconds": copies}


def time_experts(layer: experts.Layer, tp: int, batch: int, repeats: int) -> dict[str, Any]:
    """Seconds of a layer's experts on a GPU, by way: one of :data:`WAYS`."""
    made = experts.multiply(layer, tp, batch, "cuda", torch.bfloat16).ways
    ways = [kernels.capture_graph(made[name]) for name in WAYS]
    seconds = dict(zip(WAYS, kernels.time_calls("cuda", *ways, repeats=repeats), strict=True))
    for name in ("copies", "views"):
        seconds[name] /= experts.ROUTINGS
    return {"tp": tp, "batch": batch, "seconds": seconds}


def main() -> int:
    parser = _bench.options(__doc__ or "", "a few repeats of tp2")
    parser.add_argument("--model", choices=models.SHAPES, help="whose linear layers; by default Llama-3.1-8B on a GPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shim.ensure()
    device, repeats = "cuda" if torch.cuda.is_available() else "cpu", 3 if args.quick else 20
    name = args.model or ("Llama-3.1-8B" if device == "cuda" else "Qwen3-0.6B")
    dtype, degrees = torch.bfloat16 if device == "cuda" else torch.float32, DEGREES[:1] if args.quick else DEGREES
    about = _bench.about(device=torch.cuda.get_device_name() if device == "cuda" else "cpu", model=name)
    with tempfile.TemporaryDirectory() as folder:
        model = str(models.make_shape(Path(folder) / name, name))
        shape, linears, routed = ModelShape.from_config(read_config(model)), [], []
        for tp in degrees:
            for batch in BATCHES:
                linears.append(row := time_linears(shape, tp, batch, device, dtype, repeats))
                views, copies = row["views_seconds"], row["copies_seconds"]
                times = f"copies {copies * 1e3:.3f} ms, views {views * 1e3:.3f} ms, ratio {views / copies:.2f}"
                print(f"linear layers, tp{tp}, {batch} requests: {times}")
        if device == "cpu":
            print("experts: left out, their kernels need a GPU")
        else:
            with experts.use_arguments(model):
                for tp in degrees:
                    for batch in experts.BATCHES:
                        routed.append(row := time_experts(experts.QWEN3_30B_A3B, tp, batch, repeats))
                        times = ", ".join(f"{way} {seconds * 1e6:.1f} us" for way, seconds in row["seconds"].items())
                        print(f"experts, tp{tp}, {batch} requests: {times}")
    _bench.write(args.json, about=about, linears=linears, experts=routed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
