"""Float32 on a GPU: norms by torch, products without TF32, and for nobody else."""

from __future__ import annotations

import inspect
import os
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

from sglang_pat.host import adapter
from sglang_pat.host.fixes.float32 import force_float32

from .graphs import OLD

pytestmark = pytest.mark.contract


def make_norm(args, monkeypatch) -> RMSNorm:
    """A norm as SGLang builds it on a GPU, of a rank with these arguments."""
    if OLD:
        monkeypatch.setattr("sglang.srt.layers.utils.multi_platform._is_cuda", True)
    else:
        monkeypatch.setattr("sglang.kernels.fused_op._platform_key", lambda: "cuda")
    monkeypatch.setattr(RMSNorm, "forward_cuda", RMSNorm.forward_cuda)  # put back after the test
    monkeypatch.setattr(fused_moe, "invoke_fused_moe_kernel", fused_moe.invoke_fused_moe_kernel)  # put back, too
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")  # put back, too
    monkeypatch.delenv("TRITON_F32_DEFAULT")
    monkeypatch.setattr(adapter.arguments, "read", lambda given: given)
    force_float32(SimpleNamespace(**args))
    return RMSNorm(8, eps=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_in_float32_on_a_gpu(monkeypatch, dtype):
    norm = make_norm({"device": "cuda", "dtype": dtype}, monkeypatch)
    x, residual = torch.randn(2, 3, 8)
    wanted = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm(x), wanted)
    both = x + residual
    found, kept = norm(x, residual)
    torch.testing.assert_close(kept, both)
    torch.testing.assert_close(found, both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("args", [{"device": "cuda", "dtype": "bfloat16"}, {"device": "cpu", "dtype": "float32"}])
def test_otherwise_they_are_sglangs(monkeypatch, args):
    norm = make_norm(args, monkeypatch)
    method = norm._forward_method if OLD else norm._resolve_forward_method()
    assert method.__func__ is not RMSNorm.forward_native
    assert "TRITON_F32_DEFAULT" not in os.environ


def multiply_by_experts(x, weight, _, out, *rest, compute_type, **__):
    """Multiply ``x`` by the weights of each token's experts, in the place of SGLang's kernel."""
    chosen_weights, chosen, *_ = rest[3:]
    weigh, repeats = rest[8:10]
    rows = x.repeat_interleave(repeats, 0)[:, None] @ weight[chosen.flatten()].mT
    rows = rows[:, 0] * (chosen_weights.view(-1, 1) if weigh else 1)
    out.copy_(rows.to(getattr(torch, {"fp16": "float16", "fp32": "float32"}[compute_type.name])).view(out.shape))


@pytest.mark.parametrize("mended", [True, False])
def test_experts_are_not_rounded(monkeypatch, mended):
    """SGLang has the kernel round to float16 in all types but bfloat16; nothing between is done otherwise."""
    x, gate_up, down = torch.randn(5, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
    chosen = torch.tensor([[0, 3, 1]] * 4 + [[2, 1, 0]])
    weights = torch.rand(5, 3)
    hidden = (gate_up[chosen] @ x[:, None, :, None])[..., 0]
    inner = torch.nn.functional.silu(hidden[..., :24]) * hidden[..., 24:]
    wanted = ((down[chosen] @ inner[..., None])[..., 0] * weights[..., None]).sum(1)
    monkeypatch.setattr(fused_moe, "invoke_fused_moe_kernel", multiply_by_experts)
    monkeypatch.setattr(fused_moe, "moe_sum_reduce_triton", lambda each, out, _: out.copy_(each.sum(1)))
    args = SimpleNamespace(enable_fused_moe_sum_all_reduce=False)
    if OLD:
        monkeypatch.setattr(fused_moe, "get_global_server_args", lambda: args)
    else:
        monkeypatch.setattr(fused_moe, "get_exec", lambda: SimpleNamespace(moe=args))
        monkeypatch.setattr(fused_moe, "get_parallel", lambda: SimpleNamespace(tp_group=None))
        monkeypatch.setattr(fused_moe, "is_allocation_symmetric", lambda: False)
    if mended:
        make_norm({"device": "cuda", "dtype": "float32"}, monkeypatch)
    plain = set(inspect.signature(fused_moe._fused_moe_kernel_sequence).parameters)
    options = dict.fromkeys(plain) | {
        "activation": "silu",
        "is_gated": True,
        "down_moe_use_tma": False,
        "config": {"BLOCK_SIZE_M": 16},
    }
    options |= {"hidden_states": x, "w1": gate_up, "w2": down, "topk_weights": weights, "topk_ids": chosen}
    error = (fused_moe._fused_moe_kernel_sequence(**options) - wanted).abs().max()
    assert error < 1e-4 if mended else error > 1e-3, "SGLang no longer rounds them"


def test_triton_multiplies_without_tf32(monkeypatch, tmp_path):
    """Triton compiles for an H100, which need not be here, by default and as a rank has it do."""
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
    make_norm({"device": "cuda", "dtype": "float32"}, monkeypatch)
    assert ".tf32" not in compiled()
    folder = "sglang.srt.layers.attention.triton_ops" if OLD else "sglang.kernels.ops.attention"
    for name in ("extend_attention", "decode_attention"):
        text = inspect.getsource(import_module(f"{folder}.{name}"))
        assert "input_precision" not in text and "allow_tf32" not in text, "SGLang has a say of its own now"


def test_torch_multiplies_without_tf32(monkeypatch):
    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does
    try:
        make_norm({"device": "cuda", "dtype": "float32"}, monkeypatch)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")
