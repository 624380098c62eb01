"""What ``--adaptive-tp`` decides about GPUs, in one place; :func:`lines` says it at start.

Each layout has its attention backend, communicators and decode graphs (``layouts.py``).  Prefill runs without graphs
in every layout: SGLang's are pieces of one layout's model, and their runner would be a second one for each layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_pat.config import AdaptiveConfig
from sglang_pat.launch.args import AdaptiveServerArgs
from sglang_pat.launch.spec import EngineSpec
from sglang_pat.policies import registry

if TYPE_CHECKING:
    from sglang_pat.predict.profile import Profile

PREFILL_GRAPHS = "prefill runs without CUDA graphs in every layout"


def graph_sizes(args: AdaptiveServerArgs, config: AdaptiveConfig, profile: Profile | None) -> dict[int, list[int]]:
    """Batch sizes with a decode graph, by degree; the base layout's are SGLang's own, and those of the user are all
    layouts'."""
    captured = list(args.cuda_graph_bs or ())

    def largest(tp: int) -> int | None:
        return None if args.pat_graphs_given else registry.largest_batch(config, tp, profile)

    tails = {layout.tp: registry.graph_sizes(captured, largest(layout.tp)) for layout in config.layouts[1:]}
    return {config.base.tp: captured} | tails


def lines(args: AdaptiveServerArgs, spec: EngineSpec) -> list[str]:
    """What a user should know of an engine on GPUs."""
    if args.disable_cuda_graph:
        graphs = "decode runs without CUDA graphs"
    else:
        upto = ", ".join(f"tp{tp} up to batch {max(sizes)}" for tp, sizes in spec.graph_sizes.items() if sizes)
        graphs = f"decode graphs: {upto}"
    gpus, config = " ".join(map(str, spec.gpus)), spec.config
    return [
        "sglang_pat has run on one H100 that ranks shared, and on no node of several GPUs: please report what you see",
        f"{graphs}; {PREFILL_GRAPHS}",
        f"ranks 0 to {config.num_ranks - 1} run on GPUs {gpus} (--pat-gpu-order {config.gpu_order})",
    ]
