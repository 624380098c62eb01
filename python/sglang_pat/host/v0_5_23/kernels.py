"""SGLang's kernels for experts, and one that it compiles when it first needs it."""

from __future__ import annotations

import torch
from sglang.kernels.ops.activation.activation import silu_and_mul
from sglang.kernels.ops.moe.fused_moe_triton_kernels import fused_moe_kernel
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

__all__ = ["fused_moe_kernel", "silu_and_mul"]


def add_few(each: torch.Tensor, out: torch.Tensor) -> None:
    """Add up the results of each token's experts, as SGLang does for few tokens."""
    add = fused_moe.moe_sum_reduce_torch_compile
    if fused_moe.is_arch_support_pdl():
        add = fused_moe.moe_sum_reduce_triton
    add(each, out, 1.0)
