"""Experts of a mixture whose gate rows and up rows are views of the base layout's, in one launch of SGLang's kernel.

SGLang multiplies by gate and up at once: they are one weight, ``w13``, ``[experts, 2 * rows, hidden]``.  In a layout
of a higher degree a rank's gate rows and up rows are two ranges of the base's ``w13``, and no stride leads from one to
the other.  So the kernel here finds out where each row of its block lies, and hands SGLang's own kernel a pointer to
each row in the place of one pointer to the weight.  All else is SGLang's: the sums are those of a copy of ``w13``, bit
for bit, with the same blocks.  Nothing is launched, read or held that a copy would not need.

``w2`` is a view of columns, which SGLang's kernel takes as it is.

Runs on CPU tensors too when ``TRITON_INTERPRET=1`` was set before Triton was imported (for checking).
"""

# Triton takes plain values for its constexpr arguments, and options of its own beside them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner import triton as runner
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_kernels import fused_moe_kernel
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput


@triton.jit(do_not_specialize=["EM", "num_valid_tokens"])  # each number of tokens would be a kernel of its own
def _multiply(
    x,
    gate,
    jump,  # from where an up row would lie in a copy to where it lies
    out,
    topk_weights,
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
    MUL_ROUTED_WEIGHT: tl.constexpr,
    top_k: tl.constexpr,
    compute_type: tl.constexpr,
    even_Ks: tl.constexpr,
    c_sorted: tl.constexpr,
    filter_expert: tl.constexpr,
):
    # Which rows: SGLang's kernel goes through the blocks in this order.
    in_group = GROUP_SIZE_M * tl.cdiv(N, BLOCK_SIZE_N)
    first_m = tl.program_id(0) // in_group * GROUP_SIZE_M
    pid_n = tl.program_id(0) % in_group // min(tl.cdiv(EM, BLOCK_SIZE_M) - first_m, GROUP_SIZE_M)
    rows = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    jumps = (rows >= N // 2).to(tl.int64) * jump  # by tl.where Triton would lose that 16 bytes lie together
    fused_moe_kernel(
        x,
        None,  # TMA, for 8 bits
        gate + jumps[None, :],
        None,  # TMA
        None,  # bias
        out,
        None,  # scales
        None,
        topk_weights,
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
        group_n=0,
        group_k=0,
        BLOCK_SIZE_M=BLOCK_SIZE_M,
        BLOCK_SIZE_N=BLOCK_SIZE_N,
        BLOCK_SIZE_K=BLOCK_SIZE_K,
        GROUP_SIZE_M=GROUP_SIZE_M,
        MUL_ROUTED_WEIGHT=MUL_ROUTED_WEIGHT,
        top_k=top_k,
        compute_type=compute_type,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        per_channel_quant=False,
        even_Ks=even_Ks,
        c_sorted=c_sorted,
        filter_expert=filter_expert,
        swap_ab=False,
        FUSE_ADD_TO_OUTPUT=False,
        FUSE_SUM_ALL_REDUCE=False,
        ROUTER_TOPK=1,
    )


@dataclass(frozen=True)
class GateUp:
    """What SGLang's kernels get in the place of ``w13``.

    Attributes:
        gate, up: ``[experts, rows, hidden]`` each, views of one weight with the same strides.
        shape: that of a copy of both, ``(experts, 2 * rows, hidden)``: SGLang chooses its blocks by it.
    """

    gate: torch.Tensor
    up: torch.Tensor

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: they are no such views.
        """
        gate, up = self.gate, self.up
        alike = gate.shape == up.shape and gate.stride() == up.stride() and gate.dtype == up.dtype
        one = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        if gate.dim() != 3 or gate.stride(2) != 1 or not alike or not one:
            given = ", ".join(f"{list(part.shape)} with strides {list(part.stride())}" for part in (gate, up))
            raise ValueError(f"gate and up must be two ranges of the rows of one weight: {given}")

    @property
    def shape(self) -> torch.Size:
        experts, rows, hidden = self.gate.shape
        return torch.Size((experts, 2 * rows, hidden))

    @property
    def jump(self) -> int:
        """Elements from where an up row would lie in a copy to where it lies."""
        return int(self.up.storage_offset() - self.gate.storage_offset() - self.gate.shape[1] * self.gate.stride(1))


def multiply_gate_up(
    x: torch.Tensor,
    w13: GateUp,
    out: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool,
    top_k: int,
    config: dict[str, Any],
    c_sorted: bool = False,
    filter_expert: bool = False,
) -> None:
    """Each token's products with gate and up of its experts.

    Args:
        x: ``[tokens, hidden]``.
        out: written, ``[tokens * top_k, 2 * rows]``: gate, then up.
        topk_weights, topk_ids: ``[tokens, top_k]``.
        sorted_token_ids, expert_ids, num_tokens_post_padded: of SGLang's ``moe_align_block_size``.
        mul_routed_weight: multiply by ``topk_weights``, too.
        config: blocks, warps and stages, as SGLang chooses them for ``w13``.
        c_sorted: write row i for ``sorted_token_ids[i]``, as SGLang wants it where ``w2`` is read by TMA.
        filter_expert: write zeros for expert -1 (only expert parallelism has it).
    """
    _, n, k = w13.shape
    blocks = triton.cdiv(len(sorted_token_ids), config["BLOCK_SIZE_M"]) * triton.cdiv(n, config["BLOCK_SIZE_N"])
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _multiply[(blocks,)](
            x,
            w13.gate,
            w13.jump,
            out,
            topk_weights,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            n,
            k,
            len(sorted_token_ids),
            topk_ids.numel(),
            x.stride(0),
            w13.gate.stride(0),
            w13.gate.stride(1),
            out.stride(-2),
            MUL_ROUTED_WEIGHT=mul_routed_weight,
            top_k=top_k,
            compute_type=getattr(tl, str(out.dtype).removeprefix("torch.")),  # SGLang's is float16 for float32
            even_Ks=k % config["BLOCK_SIZE_K"] == 0,
            c_sorted=c_sorted,
            filter_expert=filter_expert,
            **config,
        )


def run_experts(
    dispatch_output: StandardDispatchOutput, w13: GateUp, w2: torch.Tensor, config: MoeRunnerConfig
) -> StandardCombineInput:
    """SGLang's experts on views: the same kernels, blocks and sums as on copies of them.

    By SGLang's way for LoRA: the usual one (``fused_experts_impl``) asserts that weights are contiguous.

    Args:
        w2: ``[experts, hidden, rows]``; may be a view of columns.
        config: of the layer's runner, which is Triton's.  Weights must have no bias and no scale.
    """
    _take_views()
    weights, state = runner.TritonMoeQuantInfo(w13_weight=w13, w2_weight=w2), {}
    given = runner.pre_permute_standard_to_triton(dispatch_output, weights, config, state)
    found = runner.TritonRunnerCore(config).run(given, weights, state)
    return runner.post_permute_triton_to_standard(found, weights, config, state)


def _take_views() -> None:
    """From now on SGLang's sequence of kernels takes a :class:`GateUp`, too."""
    launch = fused_moe.invoke_fused_moe_kernel
    if getattr(launch, "takes_views", False):
        return

    @wraps(launch)
    def launch_on_views(A, B, bias, C, A_scale, B_scale, B_zp, *routing, c_sorted=False, filter_expert=True, **more):
        if isinstance(B, GateUp):
            assert bias is None and A_scale is None and B_scale is None
            return multiply_gate_up(A, B, C, *routing, c_sorted=c_sorted, filter_expert=filter_expert)
        more |= {"c_sorted": c_sorted, "filter_expert": filter_expert}
        return launch(A, B, bias, C, A_scale, B_scale, B_zp, *routing, **more)

    launch_on_views.takes_views = True
    fused_moe.invoke_fused_moe_kernel = launch_on_views
