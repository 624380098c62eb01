"""The experts of a mixture on views of the base weights, beside the same on copies: the same bits, and their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_pat.acceptance import kernels
from sglang_pat.acceptance.bench import Bench
from sglang_pat.acceptance.linears import capture_graph
from sglang_pat.acceptance.results import Result
from sglang_pat.cpu import shim

DEGREES, BATCHES = (2, 4, 8), (1, 8, 64, 512)
"""One rank's part is measured, so degrees need no more GPUs than one."""
ROUTINGS = 4
"""That are measured in turn, as the layers of a model would be: so their weights do not stay in a cache."""


@dataclass(frozen=True)
class Layer:
    """Of a mixture: routed experts, each with so many gate rows, and those that each token goes to."""

    experts: int
    rows: int
    hidden: int
    top_k: int


QWEN3_30B_A3B = Layer(experts=128, rows=768, hidden=2048, top_k=8)


def experts(bench: Bench) -> Result:
    """Experts on views of the base weights give what they give on copies, bit for bit; and what they take."""
    if bench.device == "cpu":
        return Result(verdict="left out", line="the kernels for experts need a GPU")
    shim.ensure()
    from sglang.srt import server_args

    from profiler.launch import make_server_args

    before = server_args._global_server_args
    server_args._global_server_args = make_server_args(str(bench.large), [*bench.layout])  # SGLang's kernels read it
    try:
        return compare(QWEN3_30B_A3B, BATCHES, bench.device, torch.bfloat16, repeats=20)
    finally:
        server_args._global_server_args = before
        torch.cuda.empty_cache()  # for the engines


def compare(layer: Layer, batches: tuple[int, ...], device: str, dtype: torch.dtype, repeats: int) -> Result:
    """Passed if all outputs are equal in every bit."""
    found = [measure(layer, tp, batch, device, dtype, repeats) for tp in DEGREES for batch in batches]
    ways = ("copies", "views", "gate and up: copy", "one launch", "two launches")
    rows = [["tp", "requests", "equal", *(f"{way}, us" for way in ways)]]
    for row in found:
        times = (f"{row['seconds'][way] * 1e6:.1f}" for way in ways)
        rows.append([str(row["tp"]), str(row["batch"]), "yes" if row["equal"] else "NO", *times])
    ratios = [row["seconds"]["views"] / row["seconds"]["copies"] for row in found]
    equal = sum(row["equal"] for row in found)
    line = f"{equal} of {len(found)} equal in every bit; views take {min(ratios):.2f} to {max(ratios):.2f} of the time"
    verdict = "passed" if equal == len(found) else "failed"
    return Result(verdict=verdict, line=f"{line} of copies", rows=rows, figures={"rows": found})


def measure(layer: Layer, tp: int, batch: int, device: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """One layer in degree ``tp``, of the last rank, from base weights of tp1; on a GPU as CUDA graphs.

    Returns:
        ``equal``, and ``seconds`` by way.
    """
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from sglang_pat.rank.experts_triton import GateUp, multiply_gate_up, run_experts

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype) * scale

    rows = layer.rows // tp
    w13 = draw(layer.experts, 2 * layer.rows, layer.hidden, scale=0.02)
    views = GateUp(*(part[:, -rows:] for part in w13.chunk(2, dim=1)))
    down = draw(layer.experts, layer.hidden, layer.rows, scale=0.02)[:, :, -rows:]
    w13_copy, w2_copy = torch.cat([views.gate, views.up], dim=1), down.clone(memory_format=torch.contiguous_format)
    config = MoeRunnerConfig(
        num_experts=layer.experts, num_local_experts=layer.experts, inplace=False, top_k=layer.top_k
    )
    x = draw(batch, layer.hidden)
    routed = []
    for _ in range(ROUTINGS):
        scores, ids = torch.rand(batch, layer.experts, device=device).topk(layer.top_k)
        routed.append(StandardTopKOutput(scores, ids.to(torch.int32), scores))

    def on_copies(topk: StandardTopKOutput) -> torch.Tensor:
        return fused_moe.fused_experts_impl(x, w13_copy, w2_copy, *topk[:2], filter_expert=False)

    def on_views(topk: StandardTopKOutput) -> torch.Tensor:
        return run_experts(StandardDispatchOutput(x, None, topk), views, down, config).hidden_states

    out = draw(batch * layer.top_k, 2 * rows)
    plain = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant")
    unquantised: dict[str, Any] = dict.fromkeys(plain, False) | {"block_shape": None}
    blocks, _, _, *order = fused_moe._prepare_fused_moe_run(x, w13_copy, w2_copy, routed[0].topk_ids, **unquantised)
    routing: tuple[Any, ...] = routed[0].topk_weights, routed[0].topk_ids, *order, False, layer.top_k, blocks

    def launch(weight: torch.Tensor, into: torch.Tensor) -> None:
        fused_moe.invoke_fused_moe_kernel(
            x, weight, None, into, None, None, None, *routing, **unquantised, filter_expert=False,
            compute_type=getattr(fused_moe.tl, str(dtype).removeprefix("torch.")),
        )  # fmt: skip

    def launch_twice() -> None:
        launch(views.gate, out[:, :rows])
        launch(views.up, out[:, rows:])

    equal = all(torch.equal(on_copies(topk), on_views(topk)) for topk in routed)
    ways: dict[str, Callable[[], object]] = {
        "copies": lambda: [on_copies(topk) for topk in routed],
        "views": lambda: [on_views(topk) for topk in routed],
        "gate and up: copy": partial(launch, w13_copy, out),
        "one launch": partial(multiply_gate_up, x, views, out, *routing),
        "two launches": launch_twice,
    }
    if device == "cuda":
        ways = {name: capture_graph(way) for name, way in ways.items()}
    seconds = dict(zip(ways, kernels.time_calls(device, *ways.values(), repeats=repeats), strict=True))
    for name in ("copies", "views"):
        seconds[name] /= ROUTINGS
    return {"tp": tp, "batch": batch, "equal": equal, "seconds": seconds}
