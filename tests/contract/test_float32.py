"""Float32 on a GPU: norms by torch, and for nobody else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm

from sglang_pat.sglang.rank.float32 import norms_by_torch

pytestmark = pytest.mark.contract


def made(args, monkeypatch) -> RMSNorm:
    """A norm as SGLang builds it on a GPU, of a rank with these arguments."""
    monkeypatch.setattr("sglang.srt.layers.utils.multi_platform._is_cuda", True)
    monkeypatch.setattr(RMSNorm, "forward_cuda", RMSNorm.forward_cuda)  # put back after the test
    norms_by_torch(SimpleNamespace(**args))
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
