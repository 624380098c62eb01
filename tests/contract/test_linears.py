"""What bench/kernels.py compares: the linear layers of a layout on views and on copies are the same function."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sglang_pat.memory.shapes import ModelShape

SHAPE = ModelShape(
    layers=3, hidden=32, heads=8, kv_heads=2, head_dim=4, intermediate=48, vocab=64, context=64, item=4
)  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_views_and_copies_multiply_alike(tp, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import kernels

    shape = dataclasses.replace(SHAPE)
    products = kernels.build_layer(shape, tp, 3, "cpu", torch.float32)
    kv = max(1, shape.kv_heads // tp) * shape.head_dim
    widths = [shape.heads // tp * shape.head_dim + 2 * kv, shape.hidden, 2 * shape.intermediate // tp, shape.hidden]
    for product, width in zip(products, widths, strict=True):
        assert product.on_views().shape == (3, width)
        torch.testing.assert_close(product.on_views(), product.on_copy())
        base = product.parts[0].untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == base for part in product.parts), "a copy, not views"
        assert product.copy.is_contiguous() and product.copy.untyped_storage().data_ptr() != base


def test_few_tokens_are_multiplied_by_all_pieces_at_once(monkeypatch):
    pytest.importorskip("triton")
    from sglang_pat.host.layers import PiecewiseLinear
    from sglang_pat.rank import pieces_triton

    method, weight, seen = PiecewiseLinear(), torch.zeros(64, 32), []
    method.set_pieces([weight[:16], weight[32:48]], None)
    assert method.at_once is None, "a CPU has other ways"
    method.at_once = pieces_triton.make_pieces([weight[:16].half(), weight[:16].half()][:1], None)
    multiply = lambda self, x: seen.append(len(x)) or x.new_zeros(len(x), 32)  # noqa: E731
    monkeypatch.setattr(pieces_triton.Pieces, "multiply", multiply)
    for tokens in (0, 1, pieces_triton.MOST_TOKENS, pieces_triton.MOST_TOKENS + 1):
        assert method.apply(torch.nn.Module(), torch.zeros(tokens, 32)).shape == (tokens, 32)
    assert seen == [1, pieces_triton.MOST_TOKENS]
