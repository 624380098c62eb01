"""The kernel that multiplies by several pieces of a weight at once: interpreted, and compiled for an H100."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.functional import linear

from .interpreted import run_interpreted

pytestmark = pytest.mark.unit

CASES = [
    # rows of each piece in the layout, and in the whole weight; width; tokens; bias
    ([64, 32, 32], [256, 64, 64], 64, 1, False),
    ([64, 16, 16], [64, 32, 32], 96, 3, True),
    ([128, 128], [256, 256], 128, 17, False),
    ([48, 48], [96, 96], 64, 64, True),
    ([2048, 2048, 2048], [2048, 4096, 2048], 32, 33, False),
    ([32], [96], 32, 16, True),
]


def cut_pieces(sizes: list[int], whole: list[int], width: int, dtype=torch.float16):
    """Pieces from the middle of each part of a weight and of its bias, as a layout of a higher degree has them."""
    weight, bias = torch.randn(sum(whole), width).to(dtype), torch.randn(sum(whole)).to(dtype)
    weights, biases = [], []
    for size, w, b in zip(sizes, weight.split(whole), bias.split(whole), strict=True):
        start = (len(w) - size) // 2
        weights.append(w[start : start + size])
        biases.append(b[start : start + size])
    return weights, biases


def check() -> None:
    """Compare the kernel with torch, in a process with ``TRITON_INTERPRET=1``."""
    from sglang_pat.rank.pieces_triton import make_pieces

    for sizes, whole, width, tokens, with_bias in CASES:
        weights, biases = cut_pieces(sizes, whole, width)
        x = torch.randn(tokens, 2 * width).to(torch.float16)[:, :width]
        pieces = make_pieces(weights, biases if with_bias else None)
        assert pieces is not None, sizes
        bias = torch.cat(biases).float() if with_bias else None
        wanted = linear(x.float(), torch.cat(weights).float(), bias)
        torch.testing.assert_close(pieces.multiply(x).float(), wanted, atol=2e-2, rtol=2e-3)
    print(len(CASES))


@pytest.mark.long
def test_interpreted_it_multiplies_as_torch_does():
    assert run_interpreted(__name__) == str(len(CASES))


@pytest.mark.long
@pytest.mark.parametrize(
    "tokens, rows, depth, stages", [(16, 16, 256, 4), (64, 16, 256, 4), (64, 32, 128, 5), (64, 64, 128, 4)]
)
def test_it_compiles_for_a_gpu_and_fits_there(tokens, rows, depth, stages, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sglang_pat.rank.pieces_triton import _multiply

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"WIDTH": 4096, "HAS_BIAS": True, "TOKENS": tokens, "ROWS": rows, "DEPTH": depth}
    pointers = ("x", "weight", "bias", "out")
    names = list(inspect.signature(_multiply.fn).parameters)
    signature = {name: "constexpr" if name in constants else "*bf16" if name in pointers else "i32" for name in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in constants and n != "tokens"}
    source = ASTSource(fn=_multiply, signature=signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": stages})
    assert ".local" not in built.asm["ptx"], "registers spill"
    assert "mma" in built.asm["ptx"], "no tensor cores"
    assert built.metadata.shared <= 227 << 10


@pytest.mark.parametrize(
    "sizes, whole, width, dtype",
    [
        ([64, 32, 32], [256, 64, 64], 64, torch.float32),
        ([8, 8], [16, 16], 64, torch.float16),  # a tile has 16 rows
        ([16, 16], [32, 32], 48, torch.float16),  # and 32 columns
        ([16, 16, 16, 16], [16, 16, 16, 16], 64, torch.float16),
    ],
)
def test_what_it_cannot_multiply_is_left_to_torch(sizes, whole, width, dtype):
    pytest.importorskip("triton")
    from sglang_pat.rank.pieces_triton import make_pieces

    assert make_pieces(*cut_pieces(sizes, whole, width, dtype)) is None


def test_pieces_of_two_weights_are_left_to_torch():
    pytest.importorskip("triton")
    from sglang_pat.rank.pieces_triton import make_pieces

    one, other = (torch.zeros(64, 64, dtype=torch.float16) for _ in range(2))
    room = torch.zeros(40, 64, dtype=torch.float16)
    assert make_pieces([one[:32], one[32:]], None) is not None
    assert make_pieces([room[:16], room.view(-1)[24 * 64 + 8 :].view(-1)[: 15 * 64].view(15, 64)], None) is None
    assert make_pieces([one[:32], other.t()[32:]], None) is None
    biases = [torch.zeros(16, dtype=torch.float16), torch.zeros(16, dtype=torch.float16)]
    assert make_pieces([room[:16], room[16:32]], [biases[0], biases[0]]) is None


if __name__ == "__main__":
    check()
