"""Float32 on a GPU: norms by torch, products without TF32, and for nobody else."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.triton_ops import decode_attention, extend_attention
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

from sglang_pat.fixes.float32 import force_float32

pytestmark = pytest.mark.contract


def made(args, monkeypatch) -> RMSNorm:
    """A norm as SGLang builds it on a GPU, of a rank with these arguments."""
    monkeypatch.setattr(fused_moe, "invoke_fused_moe_kernel", fused_moe.invoke_fused_moe_kernel)  # put back, too
    monkeypatch.setattr("sglang.srt.layers.utils.multi_platform._is_cuda", True)
    monkeypatch.setattr(RMSNorm, "forward_cuda", RMSNorm.forward_cuda)  # put back after the test
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")  # put back, too
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    force_float32(SimpleNamespace(**args))
    return RMSNorm(8, eps=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_in_float32_on_a_gpu(monkeypatch, dtype):
    norm = made({"device": "cuda", "dtype": dtype}, monkeypatch)
    x, residual = torch.randn(2, 3, 8)
    wanted = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm(x), wanted)
    both = x + residual
    found, kept = norm(x, residual)
    torch.testing.assert_close(kept, both)
    torch.testing.assert_close(found, both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("args", [{"device": "cuda", "dtype": "bfloat16"}, {"device": "cpu", "dtype": "float32"}])
def test_otherwise_they_are_sglangs(monkeypatch, args):
    assert made(args, monkeypatch)._forward_method.__func__ is not RMSNorm.forward_native
    assert "TRITON_F32_DEFAULT" not in os.environ


def test_triton_multiplies_without_tf32(monkeypatch, tmp_path):
    """Compiled for an H100, which need not be here: as Triton does it by default, and as a rank has it do it."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .triton_product import product

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(
        fn=product, signature={"a": "*fp32", "b": "*fp32", "c": "*fp32", "N": "constexpr"}, constexprs={"N": 16}
    )

    def compiled() -> str:
        return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    assert ".tf32" in compiled()
    made({"device": "cuda", "dtype": "float32"}, monkeypatch)
    assert ".tf32" not in compiled()
    for module in (extend_attention, decode_attention):
        text = inspect.getsource(module)
        assert "input_precision" not in text and "allow_tf32" not in text, "SGLang has a say of its own now"


def test_torch_multiplies_without_tf32(monkeypatch):
    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does
    try:
        made({"device": "cuda", "dtype": "float32"}, monkeypatch)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype, rounded", [("float32", False), ("bfloat16", True)])
def test_experts_are_not_rounded_to_float16(monkeypatch, dtype, rounded):
    """What is done to what SGLang asks of its kernel; with the kernel itself: test_experts_kernel.py."""
    import triton.language as tl

    asked = []
    monkeypatch.setattr(fused_moe, "invoke_fused_moe_kernel", lambda *args, **options: asked.append((args, options)))
    made({"device": "cuda", "dtype": dtype}, monkeypatch)
    fused_moe.invoke_fused_moe_kernel("x", "w13", compute_type=tl.float16, per_channel_quant=False)
    wanted = tl.float16 if rounded else tl.float32
    assert asked == [(("x", "w13"), {"compute_type": wanted, "per_channel_quant": False})]
