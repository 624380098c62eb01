"""What ``--adaptive-tp`` decides about GPUs, in one place; :func:`lines` says it at start.

Each layout has its attention backend, communicators and decode graphs (``layouts.py``).  Prefill runs without graphs
in every layout: SGLang's are pieces of one layout's model, and their runner would be a second one for each layout.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import TYPE_CHECKING, Any

from sglang_pat.policies.batches import graph_sizes, largest_batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang_pat.predict.profile import Profile
    from sglang_pat.sglang.launch.args import AdaptiveServerArgs

logger = logging.getLogger(__name__)

SHARE_ENV = "SGLANG_PAT_SHARE_GPU"
"""``1``: all ranks run on one GPU, for ``python -m sglang_pat.acceptance`` where there is only one.  They take turns
there, and NCCL goes through sockets, so times of merged layouts and of switches mean nothing."""

PREFILL_GRAPHS = "prefill runs without CUDA graphs in every layout"


def shared() -> bool:
    """Whether all ranks run on one GPU."""
    return os.environ.get(SHARE_ENV) == "1"


def share(rank: int) -> None:
    """Where all ranks run on one GPU: have them communicate as on several.  Before the first group is made.

    NCCL refuses two ranks of one machine on one GPU: for it, each rank is a machine.  SGLang's custom all-reduce
    refuses GPUs without NVLink between them: a GPU reaches its own memory without.
    """
    if not shared():
        return
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    from sglang.srt.distributed.device_communicators import custom_all_reduce_v2

    def can_use(group: ProcessGroup, **_: Any) -> bool | None:
        return True if group.size() > 1 else None

    custom_all_reduce_v2.can_use_custom_all_reduce_with_nvlink = can_use


def refuse_graphs(args: AdaptiveServerArgs) -> None:
    """Raise ``ValueError`` where decode graphs cannot be; to be called once SGLang has decided on them."""
    if args.pat_weights == "reshard" and args.device != "cpu" and not args.disable_cuda_graph:
        raise ValueError(
            "--pat-weights reshard moves weights away from where CUDA graphs read them: "
            "add --disable-cuda-graph, or leave --pat-weights out"
        )


def settled(args: AdaptiveServerArgs, profile: Profile | None) -> AdaptiveServerArgs:
    """``args`` with what is decided here; on CUDA it is said as well.  ``profile``: of this deployment."""
    view = copy.copy(args)
    view.pat_graph_sizes = _graph_sizes(args, profile)
    if args.device == "cuda":
        for line in lines(view):
            logger.warning(line)
    return view


def _graph_sizes(args: AdaptiveServerArgs, profile: Profile | None) -> dict[int, list[int]]:
    """Batch sizes with a decode graph, by degree; the base layout's are SGLang's own, and those of the user are all
    layouts'."""
    config = args.adaptive_config()
    captured = list(args.cuda_graph_bs or ())

    def largest(tp: int) -> int | None:
        return None if args.pat_graphs_given else largest_batch(config, tp, profile)

    tails = {layout.tp: graph_sizes(captured, largest(layout.tp)) for layout in config.layouts[1:]}
    return {config.base.tp: captured} | tails


def lines(args: AdaptiveServerArgs) -> list[str]:
    """What a user should know of an engine on GPUs."""
    config = args.adaptive_config()
    if args.disable_cuda_graph:
        graphs = "decode runs without CUDA graphs"
    else:
        upto = ", ".join(f"tp{tp} up to batch {max(sizes)}" for tp, sizes in args.pat_graph_sizes.items() if sizes)
        graphs = f"decode graphs: {upto}"
    gpus = " ".join(str(args.gpu_of_rank(rank)) for rank in range(config.num_ranks))
    return [
        "sglang_pat has run on one H100 that ranks shared, and on no node of several GPUs: please report what you see",
        f"{graphs}; {PREFILL_GRAPHS}",
        f"ranks 0 to {config.num_ranks - 1} run on GPUs {gpus} (--pat-gpu-order {config.gpu_order})",
    ]
