"""Float32 on a GPU, in which all layouts must give the same tokens: what SGLang, Triton and torch lack for it.

Else a model fails in its first step, or layouts differ by some 1e-3 in a logit.

Upstream: ``docs/upstream/float32.md``
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.server_args import ServerArgs

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign


def force_float32(args: ServerArgs) -> None:
    """Have everything computed in float32 on a GPU; to be called before a model is built or a kernel compiled.

    - SGLang's kernel library has no float32 for a norm without a residual, with which every model begins: by torch.
    - SGLang has products of experts rounded to float16 in float32, too.
    - Triton multiplies float32 in TF32, which has 10 bits, unless it is told otherwise, as SGLang's attention does not.
      Layouts then differ by some 1e-3 in a logit.  What the user has set stays.
    - Images with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 have torch multiply in TF32 as well.
    """
    args = adapter.arguments.read(args)
    if args.device == "cuda" and args.dtype in ("float32", "float"):
        assign(RMSNorm, forward_cuda=RMSNorm.forward_native)
        assign(fused_moe, invoke_fused_moe_kernel=partial(_multiply_by_experts, fused_moe.invoke_fused_moe_kernel))
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        torch.set_float32_matmul_precision("highest")


def _multiply_by_experts(invoke: Callable[..., None], *tensors: Any, **options: Any) -> None:
    """Call SGLang's ``invoke_fused_moe_kernel`` with results in float32."""
    invoke(*tensors, **options | {"compute_type": tl.float32})
