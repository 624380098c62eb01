"""Arguments as of an engine with decode graphs, made of those of one on a CPU, which has none; no test of its own."""

from __future__ import annotations

from typing import Any

from sglang_pat.host import adapter

OLD = adapter.FOLDER == "v0_5_12"


def set_graphs(args: Any, sizes: list[int]) -> None:
    """Have SGLang capture decode graphs of these batch sizes."""
    if OLD:
        adapter.arguments.decide(args, disable_cuda_graph=False, cuda_graph_bs=sizes, cuda_graph_max_bs=max(sizes))
        return
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    decode = dict(backend=Backend.FULL, bs=sizes, max_bs=max(sizes))
    config = with_phase(adapter.arguments.read(args).cuda_graph_config, Phase.DECODE, **decode)
    adapter.arguments.decide(args, cuda_graph_config=config)


def has_prefill_graphs(args: Any) -> bool:
    if OLD:
        return not args.disable_piecewise_cuda_graph
    return adapter.arguments.read(args).cuda_graph_config.prefill.backend != "disabled"
