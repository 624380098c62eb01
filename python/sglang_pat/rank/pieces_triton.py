"""The product of a linear layer whose rows lie in several pieces of one larger weight, in one Triton kernel.

In a decode step such a layer only reads its weight, and one product for each piece costs more than the reading.  On an
H100 q, k and v of Llama-3.1-8B in tp8 take 22 us in three products, 8 as one copy, and 10 here (docs/results/gpu.md).
Runs on CPU tensors too when ``TRITON_INTERPRET=1`` was set before Triton was imported (for checking).
"""

# Triton takes plain values for its constexpr arguments, and options of its own beside them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl

MOST_PIECES = 3
MOST_TOKENS = 64
"""Most tokens that are multiplied by all pieces at once, as far as measured.  More are left to one product for each
piece: from some hundreds on the products take longer than the reading."""
TYPES = (torch.bfloat16, torch.float16)
"""Types that are multiplied so; float32 is for comparing tokens, not for speed."""
BLOCKS = (16, 32, 64)
"""Numbers of tokens of a block, for the tensor cores; each is a kernel of its own."""


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x,
    weight,
    bias,
    out,
    start_1,  # rows of the weight from the first piece to the second, and to the third
    start_2,
    size_0,
    size_1,
    tokens,
    x_stride,
    weight_stride,
    out_stride,
    WIDTH: tl.constexpr,  # of x
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    end_1 = size_0 + size_1
    row = tl.where(first >= size_0, first - size_0 + start_1, first)
    row = tl.where(first >= end_1, first - end_1 + start_2, row)
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    depth = tl.arange(0, DEPTH)
    at_x = x + token[:, None] * x_stride + depth[None, :]
    at_weight = weight + rows[None, :] * weight_stride + depth[:, None]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for _ in range(0, WIDTH, DEPTH):
        total = tl.dot(tl.load(at_x, mask=token[:, None] < tokens, other=0.0), tl.load(at_weight), total)
        at_x += DEPTH
        at_weight += DEPTH
    if HAS_BIAS:
        total += tl.load(bias + rows)[None, :].to(tl.float32)
    columns = first + tl.arange(0, ROWS)
    at_out = out + token[:, None] * out_stride + columns[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=token[:, None] < tokens)


@dataclass(frozen=True)
class Pieces:
    """Rows of one weight ``[rows, in]`` that are multiplied at once; made by :func:`make_pieces`.

    Attributes:
        weight, bias: the first piece, with the address and the stride of the whole; bias None without one.
        starts: rows from the first piece to the second and to the third.
        sizes: rows of the first and of the second piece.
        out: rows of all pieces.
        rows, depth: rows and columns of the weight that one program reads at a time.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    starts: tuple[int, int]
    sizes: tuple[int, int]
    out: int
    rows: int
    depth: int
    most_tokens = MOST_TOKENS

    def compile(self) -> None:
        """Compile the kernel for every number of tokens."""
        for tokens in BLOCKS:
            self.multiply(self.weight.new_zeros(tokens, self.weight.shape[1]))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product of ``x``, ``[tokens, in]``, as ``[tokens, out]``; for at most :data:`MOST_TOKENS` tokens."""
        tokens, width = x.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(tokens, self.out)
        block = next(block for block in BLOCKS if block >= min(tokens, BLOCKS[-1]))
        tile = (block + self.rows) * self.depth * x.element_size()
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            _multiply[(self.out // self.rows, triton.cdiv(tokens, block))](
                x,
                self.weight,
                self.weight if self.bias is None else self.bias,
                out,
                *self.starts,
                *self.sizes,
                tokens,
                x.stride(0),
                self.weight.stride(0),
                out.stride(0),
                WIDTH=width,
                HAS_BIAS=self.bias is not None,
                TOKENS=block,
                ROWS=self.rows,
                DEPTH=self.depth,
                num_stages=_choose_stages(x.device.index, tile, 5 if self.rows == 32 else 4) if x.is_cuda else 1,
            )
        return out


def make_pieces(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> Pieces | None:
    """Make pieces of ``[out_i, in]`` of one weight, in the order in which they lie there, and ``[out_i]`` of its bias.

    None where the kernel cannot multiply them: another type, more than three, or sizes that no tile divides.
    """
    first = weights[0]
    sizes, width, stride = [len(weight) for weight in weights], first.shape[1], first.stride(0)
    if len(weights) > MOST_PIECES or first.dtype not in TYPES or first.stride(1) != 1:
        return None
    starts, behind = [], [weight.data_ptr() - first.data_ptr() for weight in weights[1:]]
    for weight, distance in zip(weights[1:], behind, strict=True):
        rows, rest = divmod(distance, stride * first.element_size())
        if rest or weight.stride() != first.stride():
            return None
        starts.append(rows)
    if biases:
        for start, bias in zip(starts, biases[1:], strict=True):
            if bias.data_ptr() - biases[0].data_ptr() != start * bias.element_size():
                return None
    tile = _tile(gcd(*sizes, 64), sum(sizes), width)
    if tile is None:
        return None
    return Pieces(
        weight=first,
        bias=biases[0] if biases else None,
        starts=(*starts, 0, 0)[:2],
        sizes=(*sizes, 0)[:2],
        out=sum(sizes),
        rows=tile[0],
        depth=tile[1],
    )


def _tile(divisor: int, out: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of the weight that one program reads at a time, as was fastest on an H100.

    Few rows where there are few in all, so that there are programs for all of the GPU's processors.
    """
    rows = min(divisor & -divisor, 16 if out < 2048 else 32 if out < 5120 else 64)
    depth = min(width & -width, 256 if rows == 16 else 128)
    return (rows, depth) if rows >= 16 and depth >= 32 else None


@cache
def _choose_stages(device: int, tile: int, stages: int) -> int:
    """Number of tiles of ``tile`` bytes that a program has under way: ``stages``, or what this GPU has room for."""
    room = triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return max(1, min(stages, room // tile))
