"""Experts on views of the base layout's weights: SGLang's kernels give the same numbers as on copies, bit for bit.

Interpreted, and compiled for an H100.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sglang_pat.cpu import shim
from sglang_pat.host import adapter

from ..unit.interpreted import run_interpreted
from .graphs import OLD

pytestmark = [pytest.mark.contract, pytest.mark.slow]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer of a layout with degree ``tp``, as its rank ``rank`` has it of base weights with ``rows`` rows."""

    blocks: tuple[int, int, int, int]
    tp: int = 2
    rank: int = 1
    rows: int = 768
    hidden: int = 64
    experts: int = 4
    tokens: int = 5
    top_k: int = 2
    dtype: torch.dtype = torch.bfloat16


CASES = (
    # Qwen3-30B-A3B: 384, 192 and 96 rows in tp2, tp4 and tp8
    Case(tp=2, blocks=(16, 128, 64, 1)),
    Case(tp=4, rank=3, rows=384, blocks=(16, 128, 64, 16), tokens=37, top_k=3),  # a block has gate rows and up rows
    Case(tp=8, rank=5, blocks=(16, 64, 64, 1), dtype=torch.float16),
    Case(tp=8, rank=7, blocks=(16, 256, 64, 64), tokens=20, top_k=4),  # one block for all rows, and more
    Case(tp=8, rank=0, blocks=(64, 128, 32, 8), tokens=70, hidden=32, dtype=torch.float32),
    Case(tp=4, rows=192, blocks=(16, 64, 64, 1), hidden=80, tokens=1, top_k=4, dtype=torch.float32),  # odd depth
    Case(tp=2, rank=0, rows=72, blocks=(32, 64, 32, 4), tokens=9, top_k=1, experts=16),  # experts without tokens
    Case(tp=2, rows=40, blocks=(16, 16, 16, 1), hidden=16, dtype=torch.float16, top_k=1),
    Case(tp=1, rank=0, rows=96, blocks=(16, 64, 32, 1)),  # as the base has them
)


def make_weights(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Make the weights of gate and up, and ``w2``: views of the base's."""
    w13 = torch.randn(case.experts, 2 * case.rows, case.hidden).mul_(0.1).to(case.dtype)
    w2 = torch.randn(case.experts, case.hidden, case.rows).mul_(0.1).to(case.dtype)
    size = case.rows // case.tp
    begin = case.rank * size
    return [w13[:, at : at + size] for at in (begin, case.rows + begin)], w2[:, :, begin : begin + size]


def align(topk_ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what SGLang's CUDA kernel ``moe_align_block_size`` does.

    What that kernel leaves unwritten has values here.
    """
    flat = topk_ids.flatten()
    most = len(flat) * block if len(flat) < experts + 1 else len(flat) + (experts + 1) * (block - 1)
    tokens, blocks = [], []
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten().tolist()
        tokens += mine + [len(flat)] * (-len(mine) % block)
        blocks += [expert] * -(-len(mine) // block)
    padded, left = len(tokens), -(-most // block) - len(blocks)
    tokens, blocks = tokens + [0] * (most - padded), blocks + [experts - 1] * left
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (tokens, blocks, [padded]))


def give_arguments(write) -> None:
    """Have SGLang's functions find the arguments that they look at; ``write`` sets attributes of a module."""
    from sglang.srt import server_args
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    given = SimpleNamespace(enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False)
    if OLD:
        write(server_args, _global_server_args=given)
        return
    settings = SimpleNamespace(moe=given, deterministic=given)
    write(fused_moe, get_exec=lambda: settings, get_parallel=lambda: SimpleNamespace(tp_group=None))
    write(fused_moe, is_allocation_symmetric=lambda: False, is_arch_support_pdl=lambda: False)
    write(fused_moe_triton_config, get_exec=lambda: settings)


def prepare_sglang() -> None:
    """Have SGLang run its kernels as on a GPU, with stand-ins for those that are not Triton's."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    give_arguments(lambda module, **values: vars(module).update(values))

    def silu_and_mul(both, out):
        gate, up = both.chunk(2, dim=1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    stand_ins = {
        "_is_cuda": True, "moe_align_block_size": align, "silu_and_mul": silu_and_mul,
        "moe_sum_reduce": fused_moe.moe_sum_reduce_triton,
        "moe_sum_reduce_torch_compile": fused_moe.moe_sum_reduce_triton,
    }  # fmt: skip
    vars(fused_moe).update(stand_ins)


def teach_interpreter_bfloat16() -> None:
    """Have Triton's interpreter multiply bfloat16 as numbers, not its bits as integers."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return multiply(self, *(self.cast_impl(t, float32) if t.dtype == bfloat16 else t for t in (a, b)), *rest)

    InterpreterBuilder.create_dot = create_dot


def check(case: Case) -> None:
    """Compare the kernels with copies, in a process with ``TRITON_INTERPRET=1``."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, override_config

    from sglang_pat.host.experts import UNQUANTISED, PiecewiseExperts
    from sglang_pat.host.experts_triton import multiply_gate_up
    from sglang_pat.host.fixes import float32

    kernels = inspect.getmodule(adapter.kernels.fused_moe_kernel.fn)
    stock = kernels.invoke_fused_moe_kernel
    mended = partial(float32._multiply_by_experts, stock)
    fused_moe.invoke_fused_moe_kernel = mended if case.dtype == torch.float32 else stock
    (gate, up), w2 = make_weights(case)
    copy, w2_copy = torch.cat([gate, up], dim=1), w2.contiguous()
    assert case.tp == 1 or not w2.is_contiguous()
    x = torch.randn(case.tokens, case.hidden).to(case.dtype)
    ids = torch.stack([torch.randperm(max(case.experts - 1, case.top_k))[: case.top_k] for _ in x]).to(torch.int32)
    weights = torch.rand(case.tokens, case.top_k)
    config = dict(zip(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M"), case.blocks, strict=True))
    order = align(ids, config["BLOCK_SIZE_M"], case.experts)
    plain = UNQUANTISED | {"compute_type": getattr(fused_moe.tl, str(case.dtype)[6:])}
    pairs = ids.numel()

    def multiply_by_sglang(given, weight, last=False):
        out = torch.full((pairs, weight.shape[1]), 7).to(case.dtype)
        routing = weights, ids, *order, last, 1 if last else case.top_k, config
        fused_moe.invoke_fused_moe_kernel(given, weight, None, out, *[None] * 3, *routing, **plain, filter_expert=False)
        return out

    ours = torch.full((pairs, copy.shape[1]), 7).to(case.dtype)
    multiply_gate_up(x, gate, up, ours, ids, *order, config)
    assert same_bits(multiply_by_sglang(x, copy), ours), case
    exact = torch.einsum("th,tkrh->tkr", x.double(), copy[ids].double()).flatten(0, 1)
    torch.testing.assert_close(ours.double(), exact, atol=2e-2, rtol=1e-2)
    inner = torch.randn(pairs, w2.shape[2]).to(case.dtype)
    assert same_bits(*(multiply_by_sglang(inner, weight, last=True) for weight in (w2_copy, w2))), case

    method = PiecewiseExperts()
    method.set_pieces([gate, up])
    with override_config(config):
        whole = fused_moe.fused_experts_impl(x, copy, w2_copy, weights, ids, filter_expert=False)
        on_views = method.multiply_on_gpu(x, w2, weights, ids)
    # SGLang adds up two experts in another way, and has no sum for one.
    assert same_bits(whole, on_views) or case.top_k == 2 and torch.allclose(whole, on_views, rtol=1e-2), case


def check_acceptance() -> None:
    """The acceptance's step passes, and fails if a kernel is wrong."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    from sglang_pat.acceptance import experts as step
    from sglang_pat.host import experts, experts_triton

    step.ROUTINGS = 1
    layer = step.Layer(experts=4, rows=96, hidden=32, top_k=2)
    blocks = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    with override_config(blocks):
        found = step.compare(layer, (3,), "cpu", torch.bfloat16)
        experts.multiply_gate_up = experts_triton.multiply_gate_up = lambda x, gate, up, out, *_, config: out.zero_()
        wrong = step.compare(layer, (3,), "cpu", torch.bfloat16)
    assert (found.verdict, wrong.verdict) == ("passed", "failed")
    assert (found.line, wrong.line) == ("3 of 3 equal", "0 of 3 equal")
    assert [row[:3] for row in found.rows[1:]] == [[str(tp), "3", "yes"] for tp in (2, 4, 8)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int8), other.view(torch.int8))


@pytest.mark.long
def test_interpreted_they_give_what_copies_give():
    assert run_interpreted(__name__) == str(len(CASES))


@pytest.mark.parametrize("tp, tuned", [(2, True), (4, True), (8, False)])
def test_blocks_are_those_that_sglang_takes_for_copies(tp, tuned, monkeypatch):
    """SGLang takes them from its files for an H100, which has none for 96 rows."""
    pytest.importorskip("triton")
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    from sglang_pat.host import experts

    asked = []

    give_arguments(lambda module, **values: [monkeypatch.setattr(module, *pair) for pair in values.items()])
    monkeypatch.setattr(fused_moe_triton_config, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(fused_moe, "moe_align_block_size", lambda ids, block, experts: (block, experts, None))
    monkeypatch.setattr(experts, "multiply_gate_up", lambda *given, config: asked.append((*given[4:], config)))
    monkeypatch.setattr(fused_moe, "invoke_fused_moe_kernel", lambda *given, **_: asked.append(given[9:15]))
    monkeypatch.setattr(fused_moe, "silu_and_mul", lambda *_: None, raising=False)
    monkeypatch.setattr(fused_moe, "moe_sum_reduce", lambda *_: None, raising=False)
    fused_moe_triton_config.get_moe_configs.cache_clear()
    size = 768 // tp
    w13 = torch.empty(128, 2 * 768, 2048, device="meta")
    w2 = torch.empty(128, 2048, 768, device="meta")[:, :, :size]
    method = experts.PiecewiseExperts()
    method.set_pieces([w13[:, :size], w13[:, 768 : 768 + size]])
    for tokens in (1, 8, 48, 256, 4096):
        x = torch.empty(tokens, 2048, device="meta", dtype=torch.bfloat16)
        ids = torch.empty(tokens, 8, device="meta", dtype=torch.int32)
        asked.clear()
        method.multiply_on_gpu(x, w2, ids, ids)
        (_, *order, config), (*order_down, weigh, each, config_down) = asked
        wanted = fused_moe._prepare_fused_moe_run(
            x, w13[:, : 2 * size].contiguous(), w2.contiguous(), ids, block_shape=None, **experts.UNQUANTISED
        )
        assert (config, *order) == (wanted[0], *wanted[-3:]) and ("num_warps" in config) == tuned
        assert order == order_down and config_down == config and (weigh, each) == (True, 1)
    fused_moe_triton_config.get_moe_configs.cache_clear()


def test_what_are_no_two_ranges_of_one_weight_is_not_multiplied():
    pytest.importorskip("triton")
    from sglang_pat.host.experts_triton import multiply_gate_up

    w13 = torch.zeros(2, 8, 4)
    rest = torch.zeros(1, 4), torch.zeros(1, 4), *[torch.zeros(1, dtype=torch.int32)] * 4, {}
    for wrong in (w13[:, 4:7], w13.view(torch.int32)[:, 4:6], w13[:1, 4:6], w13[:, 4:6].clone()):
        with pytest.raises(AssertionError):
            multiply_gate_up(rest[0], w13[:, :2], wrong, *rest[1:])


def read_arguments():
    """SGLang's arguments of this process; None if it has none."""
    if OLD:
        from sglang.srt import server_args

        return server_args._global_server_args
    from sglang.srt import runtime_context

    return runtime_context._CONTEXT._server_args


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_step_of_the_acceptance_runs_on_a_gpu_only(device, model, monkeypatch):
    from sglang_pat.acceptance import experts
    from sglang_pat.acceptance.bench import Bench
    from sglang_pat.acceptance.results import Result

    def compare(layer, batches, device, dtype) -> Result:
        assert read_arguments().enable_deterministic_inference is False
        assert (layer, device, dtype) == (experts.QWEN3_30B_A3B, "cuda", torch.bfloat16)
        return Result(verdict="passed", line="")

    monkeypatch.setattr(experts, "compare", compare)
    before = read_arguments()
    bench = Bench(device=device, ranks=2, folder=model, small=model, mixture=model, large=model)
    assert experts.experts(bench).verdict == {"cpu": "left out", "cuda": "passed"}[device]
    assert read_arguments() is before


# -- compiled for an H100, which need not be here

POINTERS = {
    "topk_weights": "*fp32", "topk_weights_ptr": "*fp32", "sorted_token_ids": "*i32", "sorted_token_ids_ptr": "*i32",
    "expert_ids": "*i32", "expert_ids_ptr": "*i32", "num_tokens_post_padded": "*i32",
    "num_tokens_post_padded_ptr": "*i32",
}  # fmt: skip


def compile_for_h100(kernel, blocks: tuple[int, int, int, int, int, int], kind: str = "bf16"):
    """Compile a kernel for 128 experts of 2,048; most arguments are multiples of 16."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(inspect.signature(kernel.fn).parameters)
    *sizes, warps, stages = blocks
    constants = dict(zip(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M"), sizes, strict=True))
    absent = "a_desc b_desc bias_ptr a_scale_ptr b_scale_ptr add_mask_ptr".split()
    zero = "stride_bias_e stride_bias_n stride_asm stride_ask stride_bse stride_bsk stride_bsn group_n group_k".split()
    off = "MUL_ROUTED_WEIGHT use_fp8_w8a8 use_int8_w8a8 use_int8_w8a16 per_channel_quant c_sorted filter_expert swap_ab"
    off += " FUSE_ADD_TO_OUTPUT MASK_OUTPUT FUSE_SUM_ALL_REDUCE FUSE_SWIGLU USE_GDC GDC_EARLY"
    dtype = {"bf16": tl.bfloat16, "fp32": tl.float32}[kind]
    constants |= dict.fromkeys(absent) | dict.fromkeys(zero, 0) | dict.fromkeys(off.split(), False)
    constants |= dict.fromkeys(("stride_ak", "stride_bk", "stride_cn", "ROUTER_TOPK", "A_OUTPUT_SLICES"), 1)
    constants |= dict.fromkeys(("A_OUTPUT_SLICE_WIDTH", "A_OUTPUT_SLICE_K"), 0)
    constants |= {"top_k": 8, "compute_type": dtype, "even_Ks": True}
    constants = {name: value for name, value in constants.items() if name in names}
    weights = dict.fromkeys(("x", "gate", "out", "a_ptr", "b_ptr", "c_ptr"), f"*{kind}")
    types = dict.fromkeys(names, "i32") | weights | POINTERS | dict.fromkeys(constants, "constexpr")
    varied = {"EM", "num_valid_tokens"}  # of any number of tokens
    aligned = {(at,): [["tt.divisibility", 16]] for at, n in enumerate(names) if n not in constants.keys() | varied}
    source = ASTSource(fn=kernel, signature={n: types[n] for n in names}, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


@pytest.mark.parametrize(
    "blocks",  # of SGLang's file for an H100 and 192 rows: for 1, 64 and 1,536 tokens
    [(16, 64, 64, 1, 4, 5), (16, 64, 64, 32, 4, 3), (128, 256, 64, 16, 8, 4)],
)
def test_it_compiles_to_what_sglangs_kernel_is(blocks, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    from sglang_pat.host.experts_triton import _multiply, fused_moe_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ours, stock = (compile_for_h100(kernel, blocks) for kernel in (_multiply, fused_moe_kernel))

    def count(built) -> dict[str, int]:
        """Count the instructions that load, and those that multiply."""
        kinds = re.findall(r"^\s*(?:@%p\d+ )?((?:cp\.async|ld\.global|mma|wgmma\.mma)\S*)", built.asm["ptx"], re.M)
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    assert count(ours) == count(stock) and ours.metadata.shared == stock.metadata.shared <= 227 << 10
    assert ".local" not in ours.asm["ptx"], "registers spill"
    assert any("mma" in kind for kind in count(ours)), "no tensor cores"


def test_in_float32_it_multiplies_without_tf32(monkeypatch, tmp_path):
    """A rank in float32 sets this variable (host/fixes/float32.py)."""
    pytest.importorskip("triton")
    from sglang_pat.host.experts_triton import _multiply

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for precision in ("tf32", "ieee"):
        monkeypatch.setenv("TRITON_F32_DEFAULT", precision)
        built = compile_for_h100(_multiply, (16, 32, 64, 1, 4, 3), "fp32")
        assert (".tf32" in built.asm["ptx"]) == (precision == "tf32")


if __name__ == "__main__":
    shim.ensure()
    prepare_sglang()
    teach_interpreter_bfloat16()
    torch.manual_seed(0)
    for case in CASES:
        check(case)
    check_acceptance()
    print(len(CASES))
