"""Shards of every architecture: views of the base shards are what SGLang's own loader would have loaded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.shards import Block, ShardSpec
from sglang_pat.testing import models
from sglang_pat.testing.models import ARCHITECTURES

from .checkpoints import MIXTURES, Checkpoint, make_by_transformers

pytestmark = pytest.mark.contract

RANKS = 4
SHAPES = {
    "gqa": dict(heads=8, kv_heads=4),
    "shared-kv": dict(heads=8, kv_heads=2, tie=True),  # at tp 4 two ranks have the same KV head
}


@pytest.fixture(scope="module", params=[(arch, shape) for arch in ARCHITECTURES for shape in SHAPES], ids="-".join)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    arch, shape = request.param
    return Checkpoint(models.make_random(arch, tmp_path_factory.mktemp("shards") / arch, layers=1, **SHAPES[shape]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Checkpoint:
    return Checkpoint(models.make_random("llama", tmp_path_factory.mktemp("shards") / "llama", layers=1))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> Checkpoint:
    return Checkpoint(models.make_random("qwen2", tmp_path_factory.mktemp("shards") / "qwen2", layers=1))


@pytest.fixture(scope="module", params=["qwen2", *MIXTURES])
def small(request, tmp_path_factory) -> Checkpoint:
    return Checkpoint(models.make_random(request.param, tmp_path_factory.mktemp("shards") / "small", layers=1))


def find_pieces(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Parameters that lie in several pieces: name in the whole model -> pieces along its rows."""
    from sglang_pat.host.experts import PiecewiseExperts
    from sglang_pat.host.layers import PiecewiseLinear

    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, PiecewiseLinear):
            found[f"{name}.weight"] = [piece.t() for piece in method.weights]
            if method.biases is not None:
                found[f"{name}.bias"] = method.biases
        elif isinstance(method, PiecewiseExperts):
            found[f"{name}.w13_weight"] = [method.gate, method.up]
    return found


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, those that lie in pieces put together."""
    found = {name: param.data for name, param in model.named_parameters()}
    return found | {name: torch.cat(parts, parts[0].dim() // 3) for name, parts in find_pieces(model).items()}


def pieces(model: torch.nn.Module) -> list[torch.Tensor]:
    """All tensors of weights as they lie in memory."""
    split = [piece for parts in find_pieces(model).values() for piece in parts]
    assert split, "no layer in pieces"
    return [param.data for param in model.parameters()] + split


def layouts(base_tp: int) -> list[ParallelLayout]:
    return [ParallelLayout(tp, RANKS // tp) for tp in (1, 2, 4) if tp > base_tp]


@pytest.mark.parametrize("base_tp", [1, 2])
def test_views_are_what_the_loader_loads(checkpoint, base_tp):
    check_views(checkpoint, base_tp)


@pytest.mark.parametrize("kind", ["opt", "gpt_bigcode", "gptj"])
def test_views_of_models_whose_sizes_have_other_names(kind, tmp_path):
    from sglang_pat.host.fixes.weight_updates import ExpectedWeights

    checkpoint = make_by_transformers(kind, tmp_path)
    check_views(checkpoint, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    assert ExpectedWeights(checkpoint.empty(BASE, 0)).find_problem(shapes.items()) is None, (
        "an update has the checkpoint's"
    )


def check_views(checkpoint: Checkpoint, base_tp: int) -> None:
    from sglang_pat.rank.shard_check import check_heads, check_shards
    from sglang_pat.rank.weights import Views

    kv_heads = checkpoint.rank.config.get_total_num_kv_heads()
    base = ParallelLayout(base_tp, RANKS // base_tp)
    for rank in range(RANKS):
        base_model = checkpoint.loaded(base, rank)
        check_shards(base_model, base.tp, base.tp_rank(rank))
        for layout in layouts(base_tp):
            model = checkpoint.empty(layout, rank)
            check_shards(model, layout.tp, layout.tp_rank(rank))
            check_heads(model, layout.tp, kv_heads)
            Views(model, base_model, layout, base, rank)
            loaded, ours = weights(checkpoint.loaded(layout, rank)), weights(model)
            assert loaded.keys() == ours.keys()
            for name, tensor in loaded.items():
                assert torch.equal(ours[name], tensor), (name, layout, rank)
        again = weights(checkpoint.loaded(base, rank))
        assert all(torch.equal(again[name], tensor) for name, tensor in weights(base_model).items()), "written to"


@pytest.mark.parametrize("base_tp", [1, 2])
def test_an_update_must_have_the_tensors_of_the_checkpoint(checkpoint, base_tp):
    """Each of them fits, and none that is longer, shorter, of other dimensions or of another name."""
    from sglang_pat.host.fixes.weight_updates import ExpectedWeights

    expected = ExpectedWeights(checkpoint.empty(ParallelLayout(base_tp, RANKS // base_tp), 1))
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    assert expected.find_problem(shapes.items()) is None
    for name, shape in shapes.items():
        wider = (*shape[:-1], shape[-1] + 1)
        for other in ((2 * shape[0], *shape[1:]), (shape[0] - 1, *shape[1:]), (*shape, 1), wider):
            problem = expected.find_problem([(name, other)])
            assert problem and f"{name} has the shape {list(other)}, must be {list(shape)}" in problem
        for other in (f"{name}_", name.replace("layers.0", "layers.7") if "layers.0" in name else f"model.{name}"):
            problem = expected.find_problem([(other, shape)])
            assert problem and f"the model has no tensor {other!r}" in problem
    assert expected.find_problem(shapes.items()) is None


def test_an_update_of_a_model_of_the_transformers_backend(tmp_path):
    """The model raises for a name that it does not know.

    It also knows the checkpoint's names with other prefixes.
    """
    from sglang_pat.host.fixes.weight_updates import ExpectedWeights

    checkpoint = Checkpoint(models.make_random("smollm3", tmp_path / "smollm3", layers=1))
    expected = ExpectedWeights(checkpoint.empty(BASE, 0))
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    assert expected.find_problem(shapes.items()) is None
    for name, shape in shapes.items():
        problem = expected.find_problem([(name, (2 * shape[0], *shape[1:]))])
        assert problem and f"{name} has the shape" in problem
        problem = expected.find_problem([(f"{name}_", shape)])
        assert problem and f"the model has no tensor '{name}_'" in problem


def test_a_tied_head_may_be_sent(tmp_path_factory):
    from sglang_pat.host.fixes.weight_updates import ExpectedWeights

    for tie in (True, False):
        folder = tmp_path_factory.mktemp("tied") / "llama"
        checkpoint = Checkpoint(models.make_random("llama", folder, layers=1, tie=tie))
        problem = ExpectedWeights(checkpoint.empty(BASE, 0)).find_problem([("lm_head.weight", (500, 64))])
        assert (problem is None) == tie


def test_what_the_checkpoint_has_and_the_model_passes_over_may_be_sent(tmp_path):
    """Old checkpoints have the frequencies of the rotary embedding in them."""
    from functools import partial

    from sglang_pat.host.fixes.weight_updates import ExpectedWeights, read_checkpoint_shapes

    folder = models.make_random("llama", tmp_path / "llama", layers=1)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: torch.ones(8)}, folder / "more.safetensors")
    checkpoint = Checkpoint(folder)
    expected = ExpectedWeights(checkpoint.empty(BASE, 0), partial(read_checkpoint_shapes, str(folder)))
    assert expected.find_problem([(name, (8,))]) is None
    assert "no tensor" in expected.find_problem([(name.replace("0", "1"), (8,))])
    assert "no tensor" in ExpectedWeights(checkpoint.empty(BASE, 0)).find_problem([(name, (8,))])


def test_own_parameters_are_compared_with_this_ranks(llama):
    from sglang_pat.host.fixes.weight_updates import ExpectedWeights

    expected = ExpectedWeights(llama.empty(TAIL, 0))
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert expected.find_problem([(name, (192, 64))], "direct") is None
    assert "must be [192, 64]" in expected.find_problem([(name, (384, 64))], "direct")
    assert "SGLang's" in expected.find_problem([("model.layers.0.mlp.gate_proj.weight", (192, 64))], "direct")


BASE, TAIL = ParallelLayout(1, 2), ParallelLayout(2, 1)


def test_views_hold_no_memory_and_see_an_update_at_once(small):
    from sglang_pat.rank.weights import Views

    base_model, model = small.loaded(BASE, 1), small.empty(TAIL, 1)
    assert sum(param.untyped_storage().nbytes() for param in model.parameters()) < 100, "built without memory"
    views = Views(model, base_model, TAIL, BASE, 1)
    held = {param.untyped_storage().data_ptr() for param in base_model.parameters()}
    assert {piece.untyped_storage().data_ptr() for piece in pieces(model)} <= held
    before = {name: tensor.clone() for name, tensor in weights(model).items()}
    base_model.load_weights((name, 2 * tensor) for name, tensor in small.tensors.items())
    after = weights(model)
    assert all(torch.equal(after[name], 2 * before[name]) for name in after if "proj" in name or "experts" in name)
    assert not views.have_moved()


def test_views_follow_a_tensor_that_was_replaced(small):
    from sglang_pat.rank.weights import Views

    base_model, model = small.loaded(BASE, 1), small.empty(TAIL, 1)
    views = Views(model, base_model, TAIL, BASE, 1)
    wanted = {name: tensor + 1 for name, tensor in weights(model).items()}
    for param in base_model.parameters():
        param.data = param.data + 1
    assert views.have_moved()
    views.refresh()
    assert not views.have_moved()
    found = weights(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (0, 64)])
def test_a_layer_in_pieces_multiplies_as_one(qwen2, shape):
    from sglang_pat.rank.weights import Views

    base_model, model, whole = qwen2.loaded(BASE, 1), qwen2.empty(TAIL, 1), qwen2.loaded(TAIL, 1)
    Views(model, base_model, TAIL, BASE, 1)
    x = torch.randn(shape)
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        ours, theirs = (m.get_submodule(f"model.layers.0.{name}") for m in (model, whole))
        with torch.no_grad():
            got, bias = ours(x)
            wanted, _ = theirs(x)
        assert bias is None and got.is_contiguous()
        torch.testing.assert_close(got, wanted)
        into_columns = ours.quant_method._multiply_on_gpu(x.reshape(-1, 64))
        torch.testing.assert_close(into_columns.view(got.shape), wanted)


def test_a_wrong_idea_of_the_shards_is_found(llama, monkeypatch):
    """Intervals that are not the loader's: the parameter is named in one line."""
    from sglang_pat.host import layers
    from sglang_pat.rank import shard_check
    from sglang_pat.rank.shards import ShardError

    specs = layers.make_shard_specs

    def wrong(model):
        found = specs(model)
        name = next(name for name in found if "gate_up_proj" in name)
        return found | {name: ShardSpec(0, (Block(2 * 192),))}

    for tp_rank in range(2):
        shard_check.check_shards(llama.rank.make_model(2, tp_rank), 2, tp_rank)
    monkeypatch.setattr(layers, "make_shard_specs", wrong)
    with pytest.raises(ShardError, match=r"model\.layers\.0\.mlp\.gate_up_proj\.weight at tp=2") as caught:
        shard_check.check_shards(llama.rank.make_model(2, 1), 2, 1)
    assert "\n" not in str(caught.value)


def test_attention_that_is_not_cut_is_found(tmp_path):
    """SGLang's GPT-2 gives each rank's attention all heads, so it runs at tp 1 only."""
    from sglang_pat.rank.shard_check import check_heads
    from sglang_pat.rank.shards import ShardError

    gpt2 = make_by_transformers("gpt2", tmp_path)
    check_heads(gpt2.rank.make_model(1, 0), 1, 8)
    with pytest.raises(
        ShardError, match=r"transformer\.h\.0\.attn\.attn at tp=2: .* 8 KV heads .* must be 4: this model"
    ):
        check_heads(gpt2.rank.make_model(2, 1), 2, 8)


def test_a_loader_of_its_own_is_found(llama):
    """A layer that deals its rows in another order than its class says."""
    from sglang_pat.rank.shard_check import check_shards
    from sglang_pat.rank.shards import ShardError

    model = llama.rank.make_model(2, 1)
    param = model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    param.weight_loader = lambda param, loaded: param.data.copy_(loaded[:, 1::2])
    with pytest.raises(ShardError, match=r"o_proj\.weight at tp=2: .* other parts"):
        check_shards(model, 2, 1)
    param.weight_loader = lambda param, loaded: param.data.copy_(loaded)
    with pytest.raises(ShardError, match=r"o_proj\.weight at tp=2: .* as expected"):
        check_shards(model, 2, 1)


def test_packed_weights_are_refused(llama):
    """SGLang packs base weights in place on a CPU with AMX.

    A slice of packed bytes is none of the weights.
    """
    from sglang_pat.rank.shards import ShardError
    from sglang_pat.rank.weights import Views

    base_model = llama.loaded(BASE, 0)
    base_model.get_submodule("model.layers.0.mlp.down_proj").use_intel_amx_backend = True
    with pytest.raises(ShardError, match=r"down_proj .* AMX: use --dtype float32"):
        Views(llama.empty(TAIL, 0), base_model, TAIL, BASE, 0)


def test_vocabulary_padding_is_refused(llama):
    """503 tokens are 512 rows at tp 1 and 576 at tp 3."""
    from sglang_pat.rank.shards import ShardError
    from sglang_pat.rank.weights import Views

    base, tail = ParallelLayout(1, 3), ParallelLayout(3, 1)
    base_model = llama.loaded(base, 2)
    embedding = torch.nn.ModuleDict({"embed_tokens": base_model.model.embed_tokens})
    llama.rank.install(3, 2)
    other = torch.nn.ModuleDict({"embed_tokens": type(base_model.model.embed_tokens)(503, 64)})
    with pytest.raises(ShardError, match=r"embed_tokens\.weight at tp=3: .*leave tp=3 out of --pat-candidates"):
        Views(other, embedding, tail, base, 2)
