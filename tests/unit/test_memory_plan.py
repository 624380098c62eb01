"""The memory plan: what fits is within what is free, more memory never means fewer tokens, refusals name what fits."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_pat.layout import ParallelLayout, candidate_layouts
from sglang_pat.memory import estimate
from sglang_pat.memory.alternatives import alternatives
from sglang_pat.memory.demand import GIB, Demand, Supply
from sglang_pat.memory.plan import DoesNotFit, advice, make_plan
from sglang_pat.memory.room import CPU_TOKENS, MIN_TOKENS, most_tokens
from sglang_pat.memory.shapes import ModelShape

from .drawn import examples

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).parent / "model_configs"
PARAMETERS = {"llama-3.1-8b": 8_030_261_248, "qwen2.5-7b": 7_615_616_512, "qwen2.5-32b": 32_763_876_352}
"""As published."""


def shape(name: str) -> ModelShape:
    return ModelShape.from_config(json.loads((CONFIGS / f"{name}.json").read_text()))


def gpus(size: float) -> Supply:
    return Supply(kind="cuda", free=int(size * GIB), total=int(size * GIB))


def machine(size: float) -> Supply:
    return Supply(kind="cpu", free=int(size * GIB), total=int(size * GIB))


def demand(name: str, tp: int, dp: int, supply: Supply, **options) -> Demand:
    made = estimate.demand_of(shape(name), ParallelLayout(tp, dp), supply)
    return dataclasses.replace(made, **options)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    model = shape(name)
    padding = (model.padded_vocab - model.vocab) * model.hidden * 2
    assert model.parameters() - padding == PARAMETERS[name]


def test_shards_of_a_model():
    model = shape("qwen2.5-7b")
    assert [tp for tp in (1, 2, 4, 7, 8, 14, 28) if model.why_not(tp) is None] == [1, 2, 4]
    assert "28 attention heads" in model.why_not(8) and "KV heads" in model.why_not(7)
    assert model.kv_bytes(1) == 28 * 2 * 4 * 128 * 2 and model.kv_bytes(4) == model.kv_bytes(1) // 4
    assert model.local_kv_heads(8) == 1
    assert "padded" in dataclasses.replace(model, heads=9, kv_heads=9, intermediate=9, vocab=500).why_not(3)


@pytest.mark.parametrize(
    "changed,problem",
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_a_config_that_is_none(changed, problem):
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text()) | changed
    with pytest.raises(ValueError, match=problem) as caught:
        ModelShape.from_config(config)
    assert "\n" not in str(caught.value)


# -- real models on real machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,tp,dp,size,least,most",
    [
        ("llama-3.1-8b", 1, 8, 80, 300_000, 400_000),
        ("qwen2.5-32b", 2, 4, 80, 200_000, 300_000),
        ("qwen2.5-32b", 4, 2, 80, 600_000, 900_000),
    ],
)
def test_gpus(name, tp, dp, size, least, most):
    plan = make_plan(demand(name, tp, dp, gpus(size)), gpus(size))
    assert least <= plan.tokens <= most
    assert dict(plan.parts)["weights"] == shape(name).weight_bytes(tp)
    assert 0.5 < plan.static_fraction < 1


def test_an_engine_on_a_cpu_leaves_half_of_the_rest_and_no_large_pool():
    small = make_plan(demand("llama-3.1-8b", 2, 1, machine(26)), machine(26))
    assert MIN_TOKENS <= small.tokens < CPU_TOKENS
    assert small.tokens <= most_tokens(small.demand, machine(26)) * 0.5
    assert make_plan(demand("llama-3.1-8b", 2, 1, machine(500)), machine(500)).tokens == CPU_TOKENS


@pytest.mark.parametrize(
    "name,tp,dp,supply,options,message",
    [
        ("qwen2.5-32b", 1, 8, gpus(40), {}, "--tp 1 --dp 8 needs .* each GPU has 40.0 GiB free; --tp 2 --dp 4 would"),
        ("llama-3.1-8b", 1, 2, machine(24), {}, "the machine has 24.0 GiB free; --tp 2 --dp 1 would fit"),
        ("llama-3.1-8b", 1, 4, machine(60), {"tokens": 10**6}, r"--max-total-tokens \d+ or --tp 2 --dp 2|--max-total"),
        ("qwen2.5-32b", 1, 2, gpus(12), {}, "no layout of these ranks fits"),
        ("llama-3.1-8b", 1, 8, gpus(80), {"fraction": 0.99}, "--mem-fraction-static 0.99 needs .*--max-total-tokens"),
        ("llama-3.1-8b", 1, 8, gpus(80), {"fraction": 0.1}, "room for 0 KV tokens .*leave it out"),
    ],
)
def test_refusals(name, tp, dp, supply, options, message):
    asked = demand(name, tp, dp, supply, **options)
    with pytest.raises(DoesNotFit, match=message) as caught:
        make_plan(asked, supply)
    assert "\n" not in str(caught.value)


def test_what_is_given_stays():
    supply = gpus(80)
    assert make_plan(demand("llama-3.1-8b", 1, 8, supply, tokens=5000), supply).tokens == 5000
    half = make_plan(demand("llama-3.1-8b", 1, 8, supply, fraction=0.5), supply)
    parts = dict(half.parts)
    assert parts["weights"] + parts["KV"] == pytest.approx(0.5 * supply.free, rel=0.01)


def test_the_table_shows_every_part():
    plan = make_plan(demand("llama-3.1-8b", 2, 4, machine(200)), machine(200))
    lines = plan.table().splitlines()
    assert "tp2×dp4, 8 ranks" in lines[0] and len(lines) < 15
    assert all(any(what in line for line in lines) for what, _ in plan.parts)


def test_a_layout_with_hardly_any_room_is_advised_against():
    line = advice(make_plan(demand("qwen2.5-32b", 1, 8, gpus(80)), gpus(80)))
    found = re.fullmatch(
        r"a replica has room for ([\d,]+) KV tokens, the longest request of this model has ([\d,]+): "
        r"--tp 2 --dp 4 has room for ([\d,]+)",
        line,
    )
    here, longest, there = (int(number.replace(",", "")) for number in found.groups())
    assert here < longest == shape("qwen2.5-32b").context <= there
    assert make_plan(demand("qwen2.5-32b", 2, 4, gpus(80)), gpus(80)).tokens == there


@pytest.mark.parametrize("name,tp,dp,supply", [
    ("llama-3.1-8b", 1, 8, gpus(80)), ("qwen2.5-32b", 8, 1, gpus(30)), ("llama-3.1-8b", 1, 2, machine(200)),
])  # fmt: skip
def test_no_advice_where_there_is_nothing_better(name, tp, dp, supply):
    assert advice(make_plan(demand(name, tp, dp, supply), supply)) is None


# -- properties ---------------------------------------------------------------------------------------------------


@st.composite
def situations(draw) -> tuple[Demand, Supply]:
    heads = draw(st.sampled_from([4, 8, 12, 28, 32, 40]))
    model = ModelShape(
        layers=draw(st.integers(1, 96)),
        hidden=heads * 128,
        heads=heads,
        kv_heads=draw(st.sampled_from([divisor for divisor in (1, 2, 4, 8) if heads % divisor == 0])),
        head_dim=draw(st.sampled_from([64, 128])),
        intermediate=draw(st.sampled_from([64, 4096, 18944, 27648])),
        vocab=draw(st.integers(100, 200_000)),
        context=draw(st.sampled_from([512, 8192, 131_072])),
        item=draw(st.sampled_from([2, 4])),
    )
    base = ParallelLayout(draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 8)))
    assume(model.why_not(base.tp) is None)
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    free = draw(st.integers(GIB // 4, 300 * GIB))
    made = Demand(
        shape=model,
        base=base,
        degrees=model.allowed(candidate_layouts(base)),
        prefill_tokens=draw(st.sampled_from([512, 8192])),
        graph_batch=draw(st.sampled_from([0, 256])),
        max_running=draw(st.none() | st.integers(1, 5000)),
        tokens=draw(st.none() | st.integers(1, 2_000_000)),
        fraction=draw(st.none() | st.floats(0.01, 1)),
        tail_weights=draw(st.sampled_from([0, GIB])),
        gathers=draw(st.booleans()),
    )
    return made, Supply(kind=kind, free=free, total=draw(st.integers(free, 300 * GIB)))


def tokens_of(asked: Demand, supply: Supply) -> int:
    try:
        return make_plan(asked, supply).tokens
    except DoesNotFit:
        return 0


@examples(120)
@given(situations())
def test_a_plan_is_within_what_is_free(situation):
    asked, supply = situation
    try:
        plan = make_plan(asked, supply)
    except DoesNotFit:
        return
    assert plan.total_bytes <= supply.free
    assert all(size >= 0 for _, size in plan.parts)
    assert plan.tokens == (asked.tokens or plan.tokens)
    assert plan.tokens >= (asked.tokens or MIN_TOKENS)
    if supply.kind == "cuda":
        assert 0 < plan.static_fraction < 1


@examples(120)
@given(situations(), st.integers(1, 64 * GIB))
def test_more_memory_or_a_smaller_model_never_means_fewer_tokens(situation, more):
    asked, supply = situation
    asked = dataclasses.replace(asked, fraction=None)
    tokens = tokens_of(asked, supply)
    total = max(supply.total, supply.free + more)
    # SGLang's reserve on a GPU grows at 60 GiB: not across that.
    if supply.kind == "cpu" or (total > 60 * GIB) == (supply.total > 60 * GIB):
        assert tokens_of(asked, dataclasses.replace(supply, free=supply.free + more, total=total)) >= tokens
    smaller = dataclasses.replace(asked.shape, layers=max(1, asked.shape.layers // 2))
    assert tokens_of(dataclasses.replace(asked, shape=smaller), supply) >= tokens
    assert tokens_of(dataclasses.replace(asked, tail_weights=asked.tail_weights + more), supply) <= tokens


@examples(120)
@given(situations())
def test_a_refusal_names_something_that_fits(situation):
    asked, supply = situation
    try:
        make_plan(asked, supply)
        return
    except DoesNotFit as error:
        message = str(error)
    offered = list(alternatives(asked, supply))
    for other in offered:
        plan = make_plan(other, supply)
        assert plan.total_bytes <= supply.free
        assert other.shape.why_not(other.base.tp) is None
        assert supply.kind == "cpu" or other.base.num_ranks == asked.base.num_ranks
    if message.startswith("--mem-fraction-static"):
        assert make_plan(dataclasses.replace(asked, fraction=None), supply).tokens >= MIN_TOKENS
        return
    layouts = re.findall(r"--tp (\d+) --dp (\d+)(?: or| would)", message.partition("; ")[2])
    assert [(int(tp), int(dp)) for tp, dp in layouts] == [
        (other.base.tp, other.base.dp) for other in offered if other.base != asked.base
    ]
    assert "\n" not in message


@examples(120)
@given(situations())
def test_one_token_more_than_the_most_is_refused(situation):
    asked, supply = situation
    most = most_tokens(asked, supply)
    if most:
        assert tokens_of(dataclasses.replace(asked, tokens=most), supply) == most
    assert tokens_of(dataclasses.replace(asked, tokens=most + 1), supply) == 0


# -- descriptions -------------------------------------------------------------------------------------------------


def test_gpus_as_described():
    assert estimate.parse_gpus("8x80GB") == (8, 80 * GIB) and estimate.parse_gpus("2x79.5G") == (2, int(79.5 * GIB))
    for text in ("80GB", "0x80GB", "8x0GB", "8x80TB", "8x-1GB"):
        with pytest.raises(ValueError, match="e.g. 8x80GB"):
            estimate.parse_gpus(text)
    with pytest.raises(ValueError, match="8 ranks need 8 GPUs"):
        estimate.supply_of_machine("4x80GB", 8)


def test_models_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        estimate.read_config(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no config.json"):
        estimate.read_config(str(tmp_path))
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="not (JSON|a JSON object)"):
            estimate.read_config(str(tmp_path))
