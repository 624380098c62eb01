"""In the process of OpenRLHF's trainer: how the engines spent a step, in its status, which it logs and tracks."""

from __future__ import annotations

from typing import Any

import ray
from openrlhf.trainer.ppo_trainer import BasePPOTrainer

from sglang_pat import figures


def train_step(self: Any, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
    """OpenRLHF's, which ends with new weights in the engines."""
    status, step = BasePPOTrainer.train_step(self, rollout_samples, global_step)
    if self.vllm_engines:
        now = ray.get([engine.figures.remote() for engine in self.vllm_engines])
        before = getattr(self, "_pat_figures", [figures.Figures()] * len(now))
        self._pat_figures = now
        status |= figures.metrics([one.since(then) for one, then in zip(now, before, strict=True)])
    return status, step
