"""How a tensor of several processes is sent."""

from __future__ import annotations

from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

__all__ = ["LocalSerializedTensor"]
