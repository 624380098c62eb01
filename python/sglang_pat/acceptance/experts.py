"""The experts of a mixture on views of the base weights, beside the same on copies: the same bits.

Their times are those of ``bench/kernels.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from sglang_pat.acceptance.bench import Bench
from sglang_pat.acceptance.results import Result
from sglang_pat.cpu import shim
from sglang_pat.host import adapter

DEGREES, BATCHES = (2, 4, 8), (1, 8, 64, 512)
"""TP degrees, and requests of a batch.  One rank's part is measured, so one GPU is enough for all degrees."""
ROUTINGS = 4
"""Number of routings of tokens to experts, taken in turn like layers, so that no weights stay in a cache."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a mixture's layer: routed experts, gate rows of each, and the experts (``top_k``) of each token."""

    experts: int
    rows: int
    hidden: int
    top_k: int


QWEN3_30B_A3B = Layer(experts=128, rows=768, hidden=2048, top_k=8)


@dataclass(frozen=True, kw_only=True)
class Products:
    """One layer with one batch, multiplied in several ways."""

    equal: bool
    """Whether gate and up, and the down projection, are equal to those on copies, bit for bit."""
    close: bool
    """Whether the layer is equal up to rounding: SGLang sums a token's experts in another way for few tokens."""
    ways: dict[str, Callable[[], object]]
    """Calls by name: ``copies`` and ``views`` multiply all :data:`ROUTINGS`, the others gate and up of the first."""


def experts(bench: Bench) -> Result:
    """Products with experts on views of the base weights are those with copies, bit for bit."""
    if bench.device == "cpu":
        return Result(verdict="left out", line="the kernels for experts need a GPU")
    with mock.patch.dict(os.environ, bench.env), use_arguments(str(bench.large), bench.flags + bench.large_flags):
        result = compare(QWEN3_30B_A3B, BATCHES, bench.device, torch.bfloat16)
    torch.cuda.empty_cache()  # for the engines
    return result


@contextmanager
def use_arguments(model: str, flags: tuple[str, ...] = ()) -> Iterator[None]:
    """Have this process SGLang's arguments of an engine, which its choice of blocks reads."""
    shim.ensure()
    from profiler.launch import make_server_args

    with adapter.rank.use_arguments(make_server_args(model, ["--tp", "1", "--dp", "2", *flags])):
        yield


def compare(layer: Layer, batches: tuple[int, ...], device: str, dtype: torch.dtype) -> Result:
    """Result, passed if all products are equal in every bit, and the layers up to rounding."""
    rows = [["tp", "requests", "equal"]]
    for tp in DEGREES:
        for batch in batches:
            products = multiply(layer, tp, batch, device, dtype)
            rows.append([str(tp), str(batch), "yes" if products.equal and products.close else "NO"])
    equal, total = sum(row[-1] == "yes" for row in rows[1:]), len(rows) - 1
    return Result(verdict="passed" if equal == total else "failed", line=f"{equal} of {total} equal", rows=rows)


def multiply(layer: Layer, tp: int, batch: int, device: str, dtype: torch.dtype) -> Products:
    """One layer in degree ``tp``, of the last rank, from base weights of tp1."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    from sglang_pat.host.experts import UNQUANTISED, PiecewiseExperts
    from sglang_pat.host.experts_triton import multiply_gate_up

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * scale

    rows, pairs = layer.rows // tp, batch * layer.top_k
    w13 = draw(layer.experts, 2 * layer.rows, layer.hidden, scale=0.02)
    gate, up = (part[:, -rows:] for part in w13.chunk(2, dim=1))
    down = draw(layer.experts, layer.hidden, layer.rows, scale=0.02)[:, :, -rows:]
    w13_copy, down_copy = torch.cat([gate, up], dim=1), down.clone(memory_format=torch.contiguous_format)
    method = PiecewiseExperts()
    method.set_pieces([gate, up])
    x, inner = draw(batch, layer.hidden), draw(pairs, rows)
    routed = []
    for _ in range(ROUTINGS):
        weights, ids = torch.rand(batch, layer.experts, device=device).topk(layer.top_k)
        routed.append((weights, ids.to(torch.int32)))
    unquantised: dict[str, Any] = UNQUANTISED | {"block_shape": None}

    def on_copies(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_moe.fused_experts_impl(x, w13_copy, down_copy, weights, ids, filter_expert=False)

    def on_views(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return method.multiply_on_gpu(x, down, weights, ids)

    weights, ids = routed[0]
    config: Any
    config, down_config, *rest = fused_moe._prepare_fused_moe_run(x, w13_copy, down_copy, ids, **unquantised)
    order: Any = rest[-3:]

    def launch(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, last: bool = False) -> torch.Tensor:
        """SGLang's kernel; ``last``: for the down projection."""
        blocks = (down_config or config) if last else config
        routing: Any = weights, ids, *order, last, 1 if last else layer.top_k, blocks
        fused_moe.invoke_fused_moe_kernel(
            inputs, weight, None, out, None, None, None, *routing, **unquantised, filter_expert=False,
            compute_type=getattr(fused_moe.tl, str(dtype).removeprefix("torch.")),
        )  # fmt: skip
        return out

    def launch_once() -> torch.Tensor:
        multiply_gate_up(x, gate, up, gate_up, ids, *order, config=config)
        return gate_up

    def launch_twice() -> None:
        launch(x, gate, gate_up[:, :rows])
        launch(x, up, gate_up[:, rows:])

    gate_up = draw(pairs, 2 * rows)
    equal = torch.equal(launch(x, w13_copy, draw(pairs, 2 * rows)), launch_once())
    of_copy, of_view = (launch(inner, part, draw(pairs, layer.hidden), last=True) for part in (down_copy, down))
    equal &= torch.equal(of_copy, of_view)
    close = all(torch.allclose(on_copies(*one), on_views(*one), rtol=0.02, atol=1e-3) for one in routed)
    ways: dict[str, Callable[[], object]] = {
        "copies": lambda: [on_copies(*one) for one in routed],
        "views": lambda: [on_views(*one) for one in routed],
        "gate and up: copy": partial(launch, x, w13_copy, gate_up),
        "one launch": launch_once,
        "two launches": launch_twice,
    }
    return Products(equal=equal, close=close, ways=ways)
