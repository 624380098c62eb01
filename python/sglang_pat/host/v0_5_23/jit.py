"""A kernel that SGLang compiles when it first needs it."""

from sglang.kernels.ops.activation.activation import silu_and_mul

__all__ = ["silu_and_mul"]
