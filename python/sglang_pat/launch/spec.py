"""An engine's specification: computed once, from values, before anything starts, and the same in all its processes.

:func:`resolve_spec` makes the :class:`EngineSpec` of what SGLang's arguments and the model say (``host/arguments.py``
reads them).  Every refusal is a ``ValueError`` of one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_pat.config import AdaptiveConfig
from sglang_pat.launch.gpu_memory import measure_memory
from sglang_pat.launch.refusals import check_shared_memory, read_files
from sglang_pat.memory.memory_plan import Demand, MemoryPlan, format_advice, make_plan
from sglang_pat.policies.registry import get_largest_batch, select_graph_sizes
from sglang_pat.predict.profile import Fingerprint, Profile, check_fits


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine, as :func:`resolve_spec` makes it.

    Attributes:
        config: what the settings say: layouts, policy, ways to move weights and KV.
        profile: this deployment's; None where ``--pat-profile`` was not given.
        graph_sizes: batch sizes that have a decode graph, by degree.
        memory: the memory plan; None on a device that is neither a CPU nor CUDA.
        gpus: number of the GPU on this machine that each rank runs on.
        advice: a line about a better base layout, or empty.
    """

    config: AdaptiveConfig
    profile: Profile | None
    graph_sizes: dict[int, list[int]]
    memory: MemoryPlan | None
    gpus: tuple[int, ...]
    advice: str


def resolve_spec(
    config: AdaptiveConfig,
    fingerprint: Fingerprint | None,
    demand: Demand,
    device: str,
    captured: Sequence[int],
    captured_given: bool,
    has_graphs: bool,
    first_gpu: int,
    gpu_step: int,
    shared: bool,
) -> EngineSpec:
    """Decide all that is decided before the first process is started.

    Args:
        fingerprint: that of the model, the machine and the layouts; None where no profile is given.
        demand: what needs memory, but for the graphs of the layouts above the base.
        device: ``cpu``, ``cuda``, or another one of torch's.
        captured: batch sizes for which SGLang would capture a decode graph; ``captured_given``: whether they are the
            user's; ``has_graphs``: whether there are decode graphs.
        first_gpu, gpu_step: numbers of this machine's GPUs; ``shared``: whether all ranks run on the first one.

    Raises:
        ValueError: a profile that is not of this deployment, files that cannot be used, memory that does not suffice.
    """
    profile = read_files(config)
    if profile is not None:
        assert fingerprint is not None and config.profile is not None, "there is a profile"
        check_fits(profile, fingerprint, config.profile)
    # The base layout's sizes are SGLang's own, and those of the user are all layouts'.
    tails = {
        layout.tp: select_graph_sizes(
            list(captured), None if captured_given else get_largest_batch(config, layout.tp, profile)
        )
        for layout in config.layouts[1:]
    }
    places = [0 if shared else config.get_gpu_index(rank) for rank in range(config.num_ranks)]
    gpus = tuple(first_gpu + place * gpu_step for place in places)
    plan = None
    if device in ("cpu", "cuda"):
        largest = max((size for sizes in tails.values() for size in sizes), default=0) if has_graphs else 0
        plan = make_plan(replace(demand, tail_graph_batch=largest), measure_memory(device, gpus, shared))
    check_shared_memory(config)
    return EngineSpec(
        config=config,
        profile=profile,
        graph_sizes={config.base.tp: list(captured)} | tails,
        memory=plan,
        gpus=gpus,
        advice=format_advice(plan, profile) or "" if plan is not None else "",
    )
