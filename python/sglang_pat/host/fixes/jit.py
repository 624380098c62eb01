"""The kernels that SGLang compiles on a GPU machine when it first needs them, with nvcc and g++.

Some pairs of nvcc and g++ fail, and the engine would end at its first request.  ``preflight`` finds that out before.

Upstream: https://github.com/sgl-project/sglang/issues/25487
"""

from __future__ import annotations

import torch

from sglang_pat.host import adapter


def find_jit_problem() -> str | None:
    """Compile one of these kernels; returns what is wrong, in one line, or None.

    Needs CUDA.  Takes some ten seconds where it was not compiled before.
    """
    try:
        adapter.kernels.silu_and_mul(torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = next((line for line in lines if "error: " in line), lines[0]).strip()
        return (
            f"SGLang's activation.cuh cannot be compiled or run: {text}; where g++ 12 is the reason, give nvcc another "
            'one, as in NVCC_PREPEND_FLAGS="-ccbin g++-13"'
        )
    return None
