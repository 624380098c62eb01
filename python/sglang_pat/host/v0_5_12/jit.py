"""A kernel that SGLang compiles when it first needs it."""

from sglang.jit_kernel.activation import silu_and_mul

__all__ = ["silu_and_mul"]
