"""Gate and up of a mixture's experts, two ranges of rows of one weight, in one launch of SGLang's
``fused_moe_kernel``.

SGLang multiplies by both at once: they are one weight, ``w13``, ``[experts, gate's rows and then up's, hidden]``.  In
a layout of a higher degree a rank's rows of gate and of up are two ranges of the base's ``w13``, and no stride leads
from one to the other.  So the kernel here finds out where each row of its block lies, and hands SGLang's own kernel a
pointer to each row in the place of one pointer to the weight.  All else is SGLang's: with the same blocks the sums are
those of a copy, bit for bit, and nothing is launched or read that a copy would not need.

Runs on CPU tensors too when ``TRITON_INTERPRET=1`` was set before Triton was imported (for checking).
"""

# Triton takes plain values for its constexpr arguments, and options of its own beside them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_pat.host import adapter

fused_moe_kernel = adapter.kernels.fused_moe_kernel


@triton.jit(do_not_specialize=["EM", "num_valid_tokens"])  # each number of tokens would be a kernel of its own
def _multiply(
    x,
    gate,
    jump,  # from where an up row would lie in a copy to where it lies
    out,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_padded,
    N,
    K,
    EM,
    num_valid_tokens,
    x_stride,
    expert_stride,
    row_stride,
    out_stride,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    top_k: tl.constexpr,
    compute_type: tl.constexpr,
    even_Ks: tl.constexpr,
):
    # Which rows: SGLang's kernel goes through the blocks in this order.
    in_group = GROUP_SIZE_M * tl.cdiv(N, BLOCK_SIZE_N)
    first_m = tl.program_id(0) // in_group * GROUP_SIZE_M
    pid_n = tl.program_id(0) % in_group // min(tl.cdiv(EM, BLOCK_SIZE_M) - first_m, GROUP_SIZE_M)
    rows = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    jumps = (rows >= N // 2).to(tl.int64) * jump  # by tl.where Triton would lose that 16 bytes lie together
    fused_moe_kernel(
        x,
        None,  # TMA, which SGLang has for weights of 8 bits only
        gate + jumps[None, :],
        None,
        None,  # bias
        out,
        None,  # scales
        None,
        None,  # the router's weights, which the down projection is multiplied by
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        None,  # mask of what is added to
        N,
        K,
        EM,
        num_valid_tokens,
        x_stride,
        1,
        expert_stride,
        1,
        row_stride,
        0,
        0,
        out_stride,
        1,
        0,
        0,
        0,
        0,
        0,
        0,  # groups of quantised weights
        0,
        BLOCK_SIZE_M,
        BLOCK_SIZE_N,
        BLOCK_SIZE_K,
        GROUP_SIZE_M,
        False,  # with the router's weights
        top_k,
        compute_type,
        False,  # weights of 8 bits, in four ways
        False,
        False,
        False,
        even_Ks,
        False,  # five switches, of which the two versions have four in common; all are off
        False,
        False,
        False,
        False,
        1,  # experts that a sum is made of
    )


def multiply_gate_up(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    out: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    config: dict[str, Any],
) -> None:
    """Each token's products with gate and up of its experts.

    Args:
        x: ``[tokens, hidden]``.
        gate, up: ``[experts, rows, hidden]`` each, views of one weight with the same strides.
        out: written, ``[tokens * chosen, 2 * rows]``: gate, then up.
        topk_ids: the experts that the router has chosen, ``[tokens, chosen]``.
        sorted_token_ids, expert_ids, num_tokens_post_padded: results of SGLang's ``moe_align_block_size``.
        config: blocks, warps and stages, as SGLang chooses them for a copy of both.
    """
    _, rows, hidden = gate.shape
    distance = up.data_ptr() - gate.data_ptr()
    assert gate.shape == up.shape and gate.stride() == up.stride() and gate.dtype == up.dtype and gate.stride(2) == 1
    assert x.stride(1) == out.stride(1) == 1 and distance % gate.element_size() == 0
    blocks = triton.cdiv(len(sorted_token_ids), config["BLOCK_SIZE_M"])
    blocks *= triton.cdiv(2 * rows, config["BLOCK_SIZE_N"])
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _multiply[(blocks,)](
            x,
            gate,
            distance // gate.element_size() - rows * gate.stride(1),
            out,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            2 * rows,
            hidden,
            len(sorted_token_ids),
            topk_ids.numel(),
            x.stride(0),
            gate.stride(0),
            gate.stride(1),
            out.stride(0),
            top_k=topk_ids.shape[1],
            compute_type=getattr(tl, str(out.dtype).removeprefix("torch.")),
            even_Ks=hidden % config["BLOCK_SIZE_K"] == 0,
            **config,
        )
