"""SGLang's kernels for experts."""

from __future__ import annotations

import torch
from sglang.kernels.ops.moe.fused_moe_triton_kernels import fused_moe_kernel
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

__all__ = ["fused_moe_kernel"]


def add_few(each: torch.Tensor, out: torch.Tensor) -> None:
    """Add up the results of each token's experts, as SGLang does for few tokens."""
    add = fused_moe.moe_sum_reduce_torch_compile
    if fused_moe.is_arch_support_pdl():
        add = fused_moe.moe_sum_reduce_triton
    add(each, out, 1.0)
