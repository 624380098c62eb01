"""What operations of the shared-memory backend work on, and what must come out; no test of its own."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
BIG = 1_700_000  # bytes; more than three pieces
Op = dist.ReduceOp


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=g).bool()
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=g) * 3).to(dtype)
    return torch.randint(0, 100, (numel,), generator=g).to(dtype)


def expected_reduction(inputs: list[torch.Tensor], op) -> torch.Tensor:
    """The sum in rank order, half types in float32 with one rounding; bit for bit what the backend promises."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        combine = torch.logical_or if op in (Op.SUM, Op.MAX, Op.BOR) else torch.logical_and
        return functools.reduce(combine, inputs)
    if dtype in (torch.bfloat16, torch.float16):
        inputs = [x.float() for x in inputs]
    if op == Op.AVG and not dtype.is_floating_point:
        inputs = [x.long() for x in inputs]
    combine = {
        Op.SUM: torch.add,
        Op.AVG: torch.add,
        Op.PRODUCT: torch.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }[op]
    total = functools.reduce(combine, inputs)
    if op == Op.AVG:
        n = len(inputs)
        total = total / n if dtype.is_floating_point else torch.div(total, n, rounding_mode="trunc")
    return total.to(dtype)


def same(got: torch.Tensor, want: torch.Tensor, what="") -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.equal(got.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)), what
