"""What the adaptive engine does not support is refused at start, in one line that says what to change."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import sglang.srt.models as sglang_models

from sglang_pat.host import adapter
from sglang_pat.rank.draft_model import count_head_bytes
from sglang_pat.speculate.acceptance import MOST_ROWS
from sglang_pat.testing import models
from sglang_pat.testing.models import ARCHITECTURES

from .checkpoints import MIXTURES, arguments, write_mixture_config
from .graphs import has_prefill_graphs, set_graphs

pytestmark = pytest.mark.contract


REFUSED = [  # flags of SGLang: test_flags_table.py
    (dict(pat_candidates="1,3"), "tp=3", "does not divide the 2 ranks"),
    (dict(tp_size=2, dp_size=1, pat_candidates="1,2"), "tp=1", "below the base tp=2"),
    (dict(pat_gpu_order="strided"), "--pat-gpu-order 'strided'", "rank, neighbours"),
    (dict(tp_size=0), "tp=0", "at least 1"),
    (dict(tp_size=1, dp_size=3, pat_candidates="1,3"), "tp=3", "8 attention heads"),
    (dict(tp_size=16, dp_size=1), "tp=16", "8 attention heads"),
]


@pytest.mark.parametrize("options,given,advice", REFUSED, ids=[f"{given}" for _, given, _ in REFUSED])
def test_refused(model, options, given, advice):
    with pytest.raises(ValueError) as caught:
        arguments(model, **options)
    message = str(caught.value)
    assert given in message and advice in message and "\n" not in message


REFUSED_MODELS = [
    ("Gemma2ForCausalLM", dict(model_type="gemma2", query_pre_attn_scalar=8), "soft-capped"),
    # SGLang runs it as an OLMo-2.
    ("Olmo3ForCausalLM", dict(model_type="olmo3", sliding_window=64), "sliding window"),
    ("OlmoeForCausalLM", dict(model_type="olmoe"), "mixture of experts of another kind"),
    ("Glm4MoeForCausalLM", dict(model_type="glm4_moe"), "mixture of experts of another kind"),
    ("DeepseekV3ForCausalLM", dict(model_type="deepseek_v3"), "MLA"),
    ("FalconH1ForCausalLM", dict(model_type="falcon_h1"), "recurrent"),
    ("DeciLMForCausalLM", dict(block_configs=[{}]), "layers differ in size"),
    ("Gemma3ForConditionalGeneration", dict(model_type="gemma3"), "multimodal"),
    ("Qwen2ForRewardModel", dict(model_type="qwen2"), "does not generate text"),
    (
        "LlamaForCausalLM",
        dict(quantization_config=dict(quant_method="fp8", activation_scheme="dynamic")),
        r"quantised \(fp8\)",
    ),
]


@pytest.mark.parametrize(("architecture", "fields", "why"), REFUSED_MODELS, ids=[name for name, _, _ in REFUSED_MODELS])
def test_refused_models(model, tmp_path, architecture, fields, why):
    config = json.loads((model / "config.json").read_text()) | {"architectures": [architecture]} | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"does not support [A-Za-z0-9]+: .*{why}") as caught:
        arguments(tmp_path, skip_tokenizer_init=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_decoders_are_let_in(tmp_path, architecture):
    folder = models.make_random(architecture, tmp_path / "m", layers=1)
    assert len(arguments(folder, dp_size=4, pat_policy="manual").read_config().layouts) == 3


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_are_let_in(tmp_path, kind):
    folder = write_mixture_config(tmp_path, kind)
    args = arguments(folder, dp_size=8, skip_tokenizer_init=True, pat_policy="manual")
    assert [layout.tp for layout in args.read_config().layouts] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(mlp_only_layers=[1]), "SGLang gives experts to all, with weights that are never loaded"),
        (dict(decoder_sparse_step=2), "SGLang gives experts to all, with weights that are never loaded"),
        (dict(quantization_config=dict(quant_method="fp8", activation_scheme="dynamic")), r"quantised \(fp8\)"),
    ],
)
def test_mixtures_that_are_refused(tmp_path, changes, why):
    folder = write_mixture_config(tmp_path, "qwen3_moe", **changes)
    with pytest.raises(ValueError, match=f"does not support Qwen3MoeForCausalLM: .*{why}; choose a text") as caught:
        arguments(folder, skip_tokenizer_init=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_sglang_builds_all_layers_of_a_mixture_with_experts(kind):
    """Dense layers are refused for this reason; once SGLang does not, they can be let in."""
    assert "mlp_only_layers" not in Path(sglang_models.__path__[0], f"{kind}.py").read_text()


def test_experts_are_narrow(tmp_path):
    """The width of an expert is what a degree must divide."""
    folder = write_mixture_config(tmp_path, "qwen3_moe", moe_intermediate_size=100)
    assert arguments(folder, dp_size=8, skip_tokenizer_init=True, pat_policy="manual").pat_candidates == "1,2,4"
    with pytest.raises(ValueError, match="tp=8 does not divide the model's intermediate size 100"):
        arguments(folder, dp_size=8, skip_tokenizer_init=True, pat_candidates="1,8")


OTHER_NAMES = {
    "GPT2LMHeadModel": ("GPT2Config", 3072),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", 3072),
    "GPTJForCausalLM": ("GPTJConfig", 16384),
    "OPTForCausalLM": ("OPTConfig", 3072),
    "ExaoneForCausalLM": ("ExaoneConfig", 8192),
    "ChatGLMModel": ("ChatGLMConfig", 13696),
}
"""Architecture -> class of its configuration, intermediate size by default."""


@pytest.mark.parametrize("architecture", OTHER_NAMES)
def test_sizes_may_have_other_names(tmp_path, architecture):
    """The shape that we read of the model has the sizes that SGLang reads."""
    import transformers
    from sglang.srt import configs
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_pat.host.arguments import read_model_shape
    from sglang_pat.memory.shapes import ModelShape, read_config

    name, intermediate = OTHER_NAMES[architecture]
    config = (getattr(transformers, name, None) or getattr(configs, name))()
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    model = ModelConfig.from_server_args(arguments(tmp_path, skip_tokenizer_init=True, dtype="float32"))
    shape = read_model_shape(model)
    assert (shape.layers, shape.hidden, shape.heads) == (
        model.num_hidden_layers, model.hidden_size, model.num_attention_heads,
    )  # fmt: skip
    assert (shape.kv_heads, shape.head_dim) == (model.get_total_num_kv_heads(), model.head_dim)
    assert (shape.vocab, shape.context, shape.intermediate) == (model.vocab_size, model.context_len, intermediate)
    assert shape == ModelShape.from_config(read_config(str(tmp_path)), "float32"), "and so has it in preflight"


def test_norms_over_all_kv_heads_need_as_many_heads_as_ranks(tmp_path):
    folder = models.make_random("olmo2", tmp_path / "m", layers=1, kv_heads=2)
    assert arguments(folder, dp_size=4).pat_candidates == "1,2"
    with pytest.raises(ValueError, match="tp=4 is more than the model's 2 KV heads, over which it has a norm"):
        arguments(folder, dp_size=4, pat_candidates="1,2,4")


def test_default_candidates_are_those_that_the_heads_allow(model, caplog):
    args = arguments(model, dp_size=16, pat_policy="manual")
    assert args.pat_candidates == "1,2,4,8"
    assert arguments(model, dp_size=16).pat_candidates == "1,8", "threshold uses the two ends"
    assert caplog.records[-1].message == "not a candidate: tp=16 (tp=16 does not divide the model's 8 attention heads)"


def test_only_one_layout_is_said(model, caplog):
    assert len(arguments(model, dp_size=3).read_config().layouts) == 1
    assert "only one layout, tp1×dp3" in caplog.records[-1].message


def test_accepted(model):
    args = arguments(model, dp_size=4)
    assert [str(layout) for layout in args.read_config().layouts] == ["tp1×dp4", "tp4×dp1"]


def test_graphs_and_weights_that_move_exclude_each_other(model):
    """Graphs are there on CUDA only; the arguments that are read here are those of a CPU."""
    from sglang_pat.host.arguments import refuse_graphs

    args = arguments(model, pat_weights="reshard")
    adapter.arguments.decide(args, device="cuda")
    refuse_graphs(args)
    set_graphs(args, [1, 2])
    with pytest.raises(ValueError, match="--pat-weights reshard moves weights.*add --disable-cuda-graph") as caught:
        refuse_graphs(args)
    assert "\n" not in str(caught.value)


def test_each_layout_has_its_graphs_and_prefill_has_none(model):
    """The ranks are told so; SGLang's own choice of batch sizes holds for the base layout."""
    from sglang_pat.host.arguments import format_gpu_lines, make_spec

    args = arguments(model, dp_size=4, pat_switch_at=3, pat_candidates="1,2,4")
    assert not has_prefill_graphs(args)
    every, config = [1, 2, 4, 8, 16, 32], args.read_config()
    set_graphs(args, every)
    spec = make_spec(args)
    sizes = {1: every, 2: [1, 2, 4, 8], 4: [1, 2, 4, 8]}
    assert (spec.config, spec.graph_sizes, spec.gpus) == (config, sizes, (0, 1, 2, 3))
    adapter.arguments.decide(args, pat_graphs_given=True)  # who names sizes means all layouts
    assert make_spec(args).graph_sizes == dict.fromkeys((1, 2, 4), every)
    assert format_gpu_lines(args, spec)[1:] == [
        "decode graphs: tp1 up to batch 32, tp2 up to batch 8, tp4 up to batch 8; "
        "prefill runs without CUDA graphs in every layout",
        "ranks 0 to 3 run on GPUs 0 1 2 3 (--pat-gpu-order rank)",
    ]


def test_memory_for_a_trained_drafter_is_planned(model, tmp_path):
    from sglang_pat.host.arguments import prepare_start

    head = models.make_head(tmp_path / "head")
    given = dict(tp_size=1, dp_size=2, pat_speculate="4")
    plain, drafted = (
        prepare_start(arguments(model, **given, **more)).spec.memory.demand
        for more in ({}, {"pat_draft_model": str(head)})
    )
    assert plain.extra_weights == 0
    assert drafted.extra_weights == count_head_bytes(head, MOST_ROWS, drafted.shape.item)
    (head / "config.json").unlink()
    with pytest.raises(ValueError, match=f"^--pat-draft-model {head}: .*config.json.*$"):
        prepare_start(arguments(model, **given, pat_draft_model=str(head)))


def test_views_show_one_engine_outside_and_one_replica_inside(model):
    from sglang_pat.host.arguments import make_rank_view, prepare_start

    args = arguments(model, tp_size=2, dp_size=2)
    outer = prepare_start(args)
    assert (outer.tp_size, outer.dp_size) == (4, 1) and not args.resolved
    assert outer.spec.config == args.read_config() and prepare_start(outer) is outer
    assert outer.max_total_tokens == outer.spec.memory.tokens
    assert pickle.loads(pickle.dumps(outer)).spec == outer.spec, "as each process gets it"
    assert not {"spec", "_spec"} & set(adapter.arguments.get_fields(outer)), "clients see the fields"
    inner = make_rank_view(outer)
    assert (inner.tp_size, inner.dp_size) == (2, 1)
