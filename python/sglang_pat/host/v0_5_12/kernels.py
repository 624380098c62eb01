"""SGLang's kernels for experts, and one that it compiles when it first needs it."""

from __future__ import annotations

import torch
from sglang.jit_kernel.activation import silu_and_mul
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_kernels import fused_moe_kernel

__all__ = ["fused_moe_kernel", "silu_and_mul"]


def add_few(each: torch.Tensor, out: torch.Tensor) -> None:
    """Add up the results of each token's experts, as SGLang does for few tokens."""
    fused_moe.moe_sum_reduce_torch_compile(each, out, 1.0)
