"""The memory plan of an engine on SGLang: shapes and free memory in, ``max_total_tokens`` out.

SGLang sizes its pool in each rank, after loading, from what the whole machine has free (84% of it on a CPU, for every
rank) and knows nothing of other layouts; the plan sizes it once, for all ranks, before they start.
"""

from __future__ import annotations

import copy
import logging

import psutil
import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_pat.config import AdaptiveConfig
from sglang_pat.launch import sharing
from sglang_pat.launch.args import AdaptiveServerArgs, model_shape
from sglang_pat.memory.available import available_memory
from sglang_pat.memory.plan import Demand, MemoryPlan, Supply, make_plan
from sglang_pat.memory.shapes import ModelShape

logger = logging.getLogger(__name__)

PLANNED_FRACTION = 0.98
"""SGLang's own limit where ranks share memory, and the plan decides: out of the way."""


def plan(
    args: AdaptiveServerArgs, config: AdaptiveConfig, graph_sizes: dict[int, list[int]], gpus: tuple[int, ...]
) -> MemoryPlan:
    """The memory plan of an engine with these arguments.

    Raises:
        DoesNotFit: one line that says what would fit.
    """
    return make_plan(demand_of(args, config, graph_sizes), supply_of(args.device, gpus))


def with_pool(args: AdaptiveServerArgs, plan: MemoryPlan) -> AdaptiveServerArgs:
    """``args`` with the pool size of the plan; what the user gave stays."""
    view = copy.copy(args)
    if not args.pat_fraction_given:
        ours = args.device == "cpu" or sharing.shared()
        view.mem_fraction_static = PLANNED_FRACTION if ours else round(plan.static_fraction, 4)
    # On a GPU a fraction is SGLang's to apply: it has measured what is free by then.
    if args.device == "cpu" or not args.pat_fraction_given:
        view.max_total_tokens = plan.tokens
    return view


def demand_of(args: AdaptiveServerArgs, config: AdaptiveConfig, graph_sizes: dict[int, list[int]]) -> Demand:
    shape = model_shape(ModelConfig.from_server_args(args))
    graphs = args.device == "cuda" and not args.disable_cuda_graph
    tails = [graph_sizes.get(layout.tp) or [0] for layout in config.layouts[1:]]
    chunk = args.chunked_prefill_size
    return Demand(
        shape=shape,
        base=config.base,
        degrees=tuple(layout.tp for layout in config.layouts),
        prefill_tokens=chunk if chunk and chunk > 0 else args.max_prefill_tokens,
        graph_batch=args.cuda_graph_max_bs if graphs else 0,
        tail_graph_batch=max(map(max, tails), default=0) if graphs else 0,
        max_running=args.max_running_requests,
        tokens=args.max_total_tokens,
        fraction=args.mem_fraction_static if args.pat_fraction_given else None,
        tail_weights=tail_weights(shape, config),
        gathers=config.kv_exchange == "allgather",
    )


def tail_weights(shape: ModelShape, config: AdaptiveConfig) -> int:
    """Bytes of a rank for weights above the base layout: none, they are views of the base shard.

    ``reshard`` moves one parameter at a time, the largest of which is then there twice.
    """
    return 2 * shape.padded_vocab * shape.hidden * shape.item if config.weights == "reshard" else 0


def supply_of(device: str, gpus: tuple[int, ...]) -> Supply:
    """What is free now: of the machine, or of the GPU that has least; ``gpus``: of each rank."""
    if device == "cpu":
        return Supply(kind="cpu", free=available_memory(), total=psutil.virtual_memory().total)
    ranks = len(gpus)
    present = torch.cuda.device_count()
    if max(gpus) >= present:
        raise ValueError(
            f"{ranks} ranks need GPUs {min(gpus)} to {max(gpus)}, {present} are visible: "
            "choose --tp and --dp so that their product is the number of GPUs"
        )
    least = min((_gpu(gpu) for gpu in gpus), key=lambda supply: supply.free)
    if sharing.shared():
        return Supply(kind="cuda", free=least.free // ranks, total=least.total // ranks)
    return least


def _gpu(device: int) -> Supply:
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        # By NVML: ``torch.cuda.mem_get_info`` would leave a context of this process on every GPU.
        used = torch.cuda.device_memory_used(device)
    except (ImportError, RuntimeError) as error:
        logger.warning("cannot read how much memory GPU %d has free, taken as empty: %s", device, error)
        used = 0
    return Supply(kind="cuda", free=max(0, total - used), total=total)
