"""A matrix product for Triton to compile; no test of its own."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))
