"""The plan's figures are SGLang's: reserves, defaults, parameters of a rank."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_pat.host import adapter
from sglang_pat.layout import ParallelLayout
from sglang_pat.memory.memory_plan import GIB, Demand, Supply, compute_default_reserve, get_sglang_chunk_and_batch
from sglang_pat.memory.shapes import UNGATED, ModelShape, read_config
from sglang_pat.testing import models

from .checkpoints import MIXTURES, Checkpoint, make_by_transformers
from .graphs import OLD
from .machines import pretend_h100s

pytestmark = pytest.mark.contract

FULL = ModelShape(
    layers=1, hidden=64, heads=8, kv_heads=8, head_dim=8, intermediate=64, vocab=64, context=64, item=2
)  # fmt: skip


def choose_settings(monkeypatch, model, gigabytes: int, tp: int) -> tuple[int, int, float]:
    """What SGLang fills in for GPUs of that size: prefill chunk, largest graph batch, fraction."""
    pretend_h100s(monkeypatch, gigabytes * 1024)
    flags = {"disable_piecewise_cuda_graph": True} if OLD else {"disable_prefill_cuda_graph": True}
    args = adapter.arguments.resolve(ServerArgs(model_path=str(model), tp_size=tp, **flags))
    return args.chunked_prefill_size, adapter.arguments.get_largest_graph(args), args.mem_fraction_static


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("gigabytes", [16, 24, 40, 80, 141, 192])
def test_defaults_and_reserve_are_sglangs(gigabytes, tp, model, monkeypatch):
    *chosen, wanted = choose_settings(monkeypatch, model, gigabytes, tp)
    supply = Supply(kind="cuda", free=gigabytes * GIB, total=gigabytes * GIB)
    chunk, graph_batch = get_sglang_chunk_and_batch(supply.total, tp, adapter.FOLDER)
    assert [chunk, graph_batch] == chosen
    demand = Demand(
        shape=FULL, base=ParallelLayout(tp, 1), degrees=(tp,), prefill_tokens=chunk, graph_batch=graph_batch,
    )  # fmt: skip
    fraction = 1 - compute_default_reserve(demand, supply) / supply.total
    assert fraction == pytest.approx(wanted, abs=0.0006)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "opt", "gpt_bigcode", "gptj"])
def test_weights_are_those_of_the_model(kind, tmp_path):
    """Biases, norms and positions, which weigh next to nothing in a real model, do not count."""
    from sglang_pat.host.arguments import read_model_shape

    ours = kind in models.ARCHITECTURES
    checkpoint = Checkpoint(models.make_random(kind, tmp_path)) if ours else make_by_transformers(kind, tmp_path)
    shape = read_model_shape(checkpoint.rank.config)
    assert shape.mlp_matrices == (3 if ours else 2)
    assert not ours or shape == ModelShape.from_config(read_config(str(tmp_path)), "float32")
    for tp in (1, 2):
        found = dict(checkpoint.empty(ParallelLayout(tp, 1), 0).named_parameters())
        matrices = [p for name, p in found.items() if p.dim() == 2 and "position" not in name and "wpe" not in name]
        assert shape.parameters(tp) == sum(p.numel() for p in matrices)


@pytest.mark.parametrize("kind", MIXTURES)
def test_weights_are_those_of_a_mixture(kind, tmp_path):
    """The plan counts the experts of all layers and their routers at each degree."""
    from sglang_pat.host.arguments import read_model_shape

    sizes = dict(layers=2, vocab=512, kv_heads=4, experts=16, expert_width=48)
    checkpoint = Checkpoint(models.make_random(kind, tmp_path, **sizes))
    shape = read_model_shape(checkpoint.rank.config)
    assert shape.mixture and (shape.mixture.experts, shape.mixture.width) == (16, 48)
    assert shape == ModelShape.from_config(read_config(str(tmp_path)), "float32"), "as preflight reads it"
    for tp in (1, 2, 4, 8):
        assert shape.find_reason_against_degree(tp) is None
        found = checkpoint.empty(ParallelLayout(tp, 1), 0).parameters()
        assert shape.weight_bytes(tp) == sum(p.numel() * p.itemsize for p in found if p.dim() > 1)


def test_a_degree_above_the_number_of_experts_is_refused_as_sglang_does(tmp_path):
    from sglang_pat.host.arguments import read_model_shape

    checkpoint = Checkpoint(models.make_random("qwen3_moe", tmp_path, layers=1, experts=4))
    reason = read_model_shape(checkpoint.rank.config).find_reason_against_degree(8)
    assert reason == "is more than the model's 4 experts"
    with pytest.raises(ValueError, match="size 8 is greater than the number of experts 4"):
        checkpoint.empty(ParallelLayout(8, 1), 0)


NOT_IN_THIS_FILE = frozenset({"deepseek_v4", "iquest_loopcoder", "mllama", "nemotron_h", "transformers"})
if not OLD:
    NOT_IN_THIS_FILE |= {"gigachat35", "hunyuan_v4", "kimi_k25_eagle3", "zaya"}
"""Files of SGLang without a layer for gate and up together, whose models have an MLP of another file, or are mixtures
of experts, hybrids, drafters, see images, have latent attention, or are transformers' own."""
FILES = {"gpt_j": "gptj"}
"""Files of SGLang that are named otherwise than their ``model_type`` -> that type."""


def test_kinds_without_a_gate_are_all_that_sglang_has():
    import sglang.srt.models as sglang_models

    found = {"gpt2"}  # its class is called otherwise: GPT2LMHeadModel
    for file in Path(sglang_models.__path__[0]).glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8-sig"))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        decoder = any(isinstance(n, ast.ClassDef) and n.name.endswith("ForCausalLM") for n in nodes)
        if decoder and "ColumnParallelLinear" in names and "MergedColumnParallelLinear" not in names:
            found.add(FILES.get(file.stem, file.stem))
    assert found == UNGATED | NOT_IN_THIS_FILE
