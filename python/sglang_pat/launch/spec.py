"""What an engine is: resolved once, at the start, and the same in all its processes."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_pat.config import AdaptiveConfig
from sglang_pat.memory.plan import MemoryPlan
from sglang_pat.predict.profile import Profile


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Made by :func:`sglang_pat.launch.start.resolve`.

    Attributes:
        config: what the settings say: layouts, policy, ways to move weights and KV.
        profile: of this deployment; None where ``--pat-profile`` was not given.
        graph_sizes: batch sizes that have a decode graph, by degree.
        memory: the memory plan; None on a device that is neither a CPU nor CUDA.
        gpus: number of the GPU on this machine that each rank runs on.
    """

    config: AdaptiveConfig
    profile: Profile | None
    graph_sizes: dict[int, list[int]]
    memory: MemoryPlan | None
    gpus: tuple[int, ...]
