"""SGLang's kernels for experts."""

from __future__ import annotations

import torch
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_kernels import fused_moe_kernel

__all__ = ["fused_moe_kernel"]


def add_few(each: torch.Tensor, out: torch.Tensor) -> None:
    """Add up the results of each token's experts, as SGLang does for few tokens."""
    fused_moe.moe_sum_reduce_torch_compile(each, out, 1.0)
