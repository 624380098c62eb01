"""The memory plan: what fits is within what is free, more memory never means fewer tokens, refusals name what fits."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_pat import preflight
from sglang_pat.layout import ParallelLayout, list_candidate_layouts
from sglang_pat.memory.memory_plan import (
    CPU_TOKENS,
    GIB,
    MIN_TOKENS,
    TOKEN_STEP,
    Demand,
    DoesNotFit,
    Supply,
    compute_max_tokens,
    count_needed_bytes,
    find_better_base,
    format_advice,
    make_default_demand,
    make_plan,
    measure_gpu_memory,
)  # fmt: skip
from sglang_pat.memory.shapes import Mixture, ModelShape, read_config
from sglang_pat.predict.profile import save
from studies.modelled import A3B, H100, MIXTURE_ROOM, build

from .drawn import examples

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).parent / "model_configs"
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "mixtral-8x7b": 46_702_792_704,
}
"""Numbers of parameters, as published."""


def shape(name: str) -> ModelShape:
    return ModelShape.from_config(json.loads((CONFIGS / f"{name}.json").read_text()))


def supply(kind: str, size: float) -> Supply:
    return Supply(kind=kind, free=int(size * GIB), total=int(size * GIB))


def demand(name: str, tp: int, dp: int, there: Supply, **options) -> Demand:
    return dataclasses.replace(make_default_demand(shape(name), ParallelLayout(tp, dp), there, "v0_5_12"), **options)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    """Biases and norms are left out."""
    assert shape(name).parameters() == pytest.approx(PARAMETERS[name], rel=1e-4)


def test_shards_of_a_model():
    model = shape("qwen2.5-7b")
    assert [tp for tp in (1, 2, 4, 7, 8, 14, 28) if model.find_reason_against_degree(tp) is None] == [1, 2, 4]
    assert "28 attention heads" in model.find_reason_against_degree(
        8
    ) and "KV heads" in model.find_reason_against_degree(7)
    assert model.kv_bytes(1) == 28 * 2 * 4 * 128 * 2 and model.kv_bytes(4) == model.kv_bytes(1) // 4
    assert model.local_kv_heads(8) == 1
    assert "padded" in dataclasses.replace(
        model, heads=9, kv_heads=9, intermediate=9, vocab=500
    ).find_reason_against_degree(3)


def test_shards_of_a_mixture():
    """What divides is the width of its experts; that of an MLP, which it does not have, is of no account."""
    model = shape("qwen3-30b-a3b")
    assert model.mixture == Mixture(experts=128, per_token=8, width=768)
    assert model.weight_bytes(8) == pytest.approx(model.weight_bytes(1) / 8, rel=0.01)
    assert [tp for tp in (1, 2, 4, 8) if model.find_reason_against_degree(tp) is None] == [1, 2, 4, 8]
    narrow = dataclasses.replace(model.mixture, width=132, experts=8)
    assert "intermediate size 132" in (dataclasses.replace(model, mixture=narrow).find_reason_against_degree(8) or "")
    assert "8 experts" in (dataclasses.replace(model, mixture=narrow).find_reason_against_degree(16) or "")
    shared = dataclasses.replace(model, mixture=dataclasses.replace(model.mixture, shared_width=1026))
    assert "intermediate size 1026" in (shared.find_reason_against_degree(4) or "")
    assert shared.parameters() - model.parameters() == 48 * (3 * 2048 * 1026 + 2048)


def test_the_largest_parameter():
    """Gate and up of 128 experts, or an embedding."""
    assert shape("qwen3-30b-a3b").largest_parameter == 128 * 2 * 768 * 2048
    assert shape("qwen2.5-7b").largest_parameter == 152064 * 3584


def test_a_token_is_in_several_experts_at_once():
    """Gate, up, their product and the result of each."""
    there = supply("cuda", 80)
    asked = demand("qwen3-30b-a3b", 1, 8, there, prefill_tokens=8192)
    dense = dataclasses.replace(asked, shape=dataclasses.replace(asked.shape, mixture=None, intermediate=8))
    more = asked.count_activation_bytes() - dense.count_activation_bytes()
    assert more == 8192 * (8 * (3 * 768 + 2048) - 3 * 8) * 2


def test_a_config_that_is_none():
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    for changed, problem in (
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"num_experts": 8}, "num_experts_per_tok is missing"),
        ({"num_experts": "8"}, "num_experts is '8'"),
    ):
        with pytest.raises(ValueError, match=problem):
            ModelShape.from_config(config | changed)


# -- real models on real machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,tp,dp,least,most,sleep",
    [
        ("llama-3.1-8b", 1, 8, 300_000, 400_000, 2.5),
        ("qwen2.5-32b", 2, 4, 200_000, 300_000, None),
        ("qwen2.5-32b", 4, 2, 600_000, 900_000, None),
        ("qwen3-30b-a3b", 1, 8, 50_000, 100_000, None),
        ("qwen3-30b-a3b", 2, 4, 650_000, 750_000, None),
        ("qwen3-30b-a3b", 4, 2, 1_850_000, 2_000_000, None),
    ],
)
def test_gpus_of_80_gb(name, tp, dp, least, most, sleep):
    plan = make_plan(demand(name, tp, dp, supply("cuda", 80)), supply("cuda", 80))
    assert least <= plan.tokens <= most
    assert plan.parts["weights"] == shape(name).weight_bytes(tp)
    assert 0.5 < plan.static_fraction < 1
    assert sleep is None or plan.kept / GIB == pytest.approx(sleep, abs=0.05), "docs/gpu.md says so"
    assert all(what in plan.format_table() for what in plan.parts)


@pytest.mark.parametrize("name, tp", MIXTURE_ROOM)
def test_studies_have_the_room_that_is_planned(name, tp):
    """If not: ``python -m studies.modelled``, and the tables that its profiles lead to."""
    there = supply("cuda", 80)
    planned = make_plan(demand(name, tp, 8 // tp, there), there).tokens
    assert MIXTURE_ROOM[name, tp] == pytest.approx(planned, rel=0.03)


def test_an_engine_on_a_cpu_leaves_half_of_the_rest_and_no_large_pool():
    small = make_plan(demand("llama-3.1-8b", 2, 1, supply("cpu", 26)), supply("cpu", 26))
    assert MIN_TOKENS <= small.tokens < CPU_TOKENS
    assert small.tokens <= compute_max_tokens(small.demand, small.supply) * 0.5
    assert make_plan(demand("llama-3.1-8b", 2, 1, supply("cpu", 500)), supply("cpu", 500)).tokens == CPU_TOKENS


@pytest.mark.parametrize(
    "name,tp,dp,kind,size,options,message",
    [
        ("qwen2.5-32b", 1, 8, "cuda", 40, {}, "^--tp 1 --dp 8 needs .* has 40.0 GiB free; --tp 2 --dp 4 would fit"),
        ("llama-3.1-8b", 1, 2, "cpu", 24, {}, "the machine has 24.0 GiB free; --tp 2 --dp 1 would fit"),
        ("llama-3.1-8b", 1, 4, "cpu", 100, {"tokens": 10**6}, r"000 needs .* free; --max-total-tokens \d+ would"),
        ("qwen2.5-32b", 1, 2, "cuda", 12, {}, "no higher degree fits"),
        ("llama-3.1-8b", 1, 8, "cuda", 80, {"fraction": 0.99}, r"-static 0.99 leaves room for \d+ .* leave it out"),
        ("llama-3.1-8b", 1, 8, "cuda", 80, {"fraction": 0.1}, "room for 0 KV tokens .* leave it out"),
    ],
)
def test_refusals(name, tp, dp, kind, size, options, message):
    with pytest.raises(DoesNotFit, match=message):
        make_plan(demand(name, tp, dp, supply(kind, size), **options), supply(kind, size))


def test_what_is_given_stays():
    there = supply("cuda", 80)
    assert make_plan(demand("llama-3.1-8b", 1, 8, there, tokens=5000), there).tokens == 5000
    half = make_plan(demand("llama-3.1-8b", 1, 8, there, fraction=0.5), there)
    assert half.parts["weights"] + half.parts["KV"] == pytest.approx(0.5 * there.free, rel=0.01)


def test_a_layout_with_hardly_any_room_is_advised_against():
    there, small = supply("cuda", 80), supply("cuda", 40)
    assert "the longest request of this model has 131,072: a degree above --tp 1 has more room" in (
        format_advice(make_plan(demand("llama-3.1-8b", 1, 8, small), small)) or ""
    )
    assert format_advice(make_plan(demand("llama-3.1-8b", 1, 8, there), there)) is None


@pytest.mark.parametrize(
    ("name", "tp", "better"),
    [
        ("qwen3-30b-a3b", 1, 4), ("qwen3-30b-a3b", 2, None), ("qwen3-30b-a3b", 4, None), ("qwen2.5-32b", 1, 4),
        ("qwen2.5-7b", 1, None), ("llama-3.1-8b", 2, None), ("mixtral-8x7b", 2, 4),
    ],
)  # fmt: skip
def test_a_low_base_that_leaves_little_room_is_named(name, tp, better):
    """The weights of the base bound KV in every layout: which degree to take instead."""
    there = supply("cuda", 80)
    plan = make_plan(demand(name, tp, 8 // tp, there), there)
    found = find_better_base(plan)
    assert (found and found.layout.tp) == better
    line = format_advice(plan) or ""
    assert (f"--tp {better} --dp {8 // (better or 1)} has room for" in line) == (
        better is not None
    ) and "\n" not in line


def test_a_low_base_on_a_profile():
    """Where full replicas are hardly faster with more room, nothing is said; else how much faster they are."""
    there = supply("cuda", 80)
    plan = make_plan(demand("qwen3-30b-a3b", 1, 8, there), there)
    profile = build(H100, A3B, 1, ("a test",), False)
    found = find_better_base(plan, profile)
    assert found and found.layout.tp == 4 and 1.5 < found.speed < 4
    assert f"{found.speed:.1f} times as fast" in (format_advice(plan, profile) or "")
    flat = (msgspec.structs.replace(point, seconds=1e-3 * point.batch) for point in profile.decode)
    assert find_better_base(plan, msgspec.structs.replace(profile, decode=tuple(flat))) is None


def test_nobody_is_told_where_the_room_is_not_ours_to_choose():
    there = supply("cuda", 80)
    assert find_better_base(make_plan(demand("qwen3-30b-a3b", 1, 8, there, tokens=20_000), there)) is None
    machine = supply("cpu", 800)
    assert format_advice(make_plan(demand("qwen3-30b-a3b", 1, 8, machine), machine)) is None


SIZES = [field.name for field in dataclasses.fields(Mixture)]


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
        mixture=draw(st.none() | st.builds(Mixture, **{name: st.sampled_from([8, 64, 96]) for name in SIZES})),
    )
    base = ParallelLayout(draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 8)))
    assume(model.find_reason_against_degree(base.tp) is None)
    free = draw(st.integers(GIB // 4, 300 * GIB))
    made = Demand(
        shape=model,
        base=base,
        degrees=model.list_allowed_degrees(list_candidate_layouts(base)),
        prefill_tokens=draw(st.sampled_from([512, 8192])),
        graph_batch=draw(st.sampled_from([0, 256])),
        max_running=draw(st.none() | st.integers(1, 5000)),
        tokens=draw(st.none() | st.integers(1, 2_000_000)),
        fraction=draw(st.none() | st.floats(0.01, 1)),
        extra_weights=draw(st.sampled_from([0, GIB])),
        gathers=draw(st.booleans()),
    )
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    return made, Supply(kind=kind, free=free, total=draw(st.integers(free, 300 * GIB)))


def count_tokens(asked: Demand, there: Supply) -> int:
    try:
        return make_plan(asked, there).tokens
    except DoesNotFit:
        return 0


@examples(120)
@given(situations())
def test_a_plan_is_within_what_is_free_and_a_refusal_names_what_fits(situation):
    asked, there = situation
    try:
        plan = make_plan(asked, there)
    except DoesNotFit as error:
        message = str(error)
        assert "\n" not in message
        free = dataclasses.replace(asked, tokens=None, fraction=None)
        if named := re.search(r"; --max-total-tokens (\d+) would fit", message):
            assert count_tokens(dataclasses.replace(free, tokens=int(named[1])), there) >= MIN_TOKENS
        elif named := re.search(r"; --tp (\d+) --dp (\d+) would fit", message):
            base = ParallelLayout(int(named[1]), int(named[2]))
            assert base.num_ranks == asked.base.num_ranks and asked.shape.find_reason_against_degree(base.tp) is None
            degrees = tuple(tp for tp in asked.degrees if tp >= base.tp) or (base.tp,)
            assert count_tokens(dataclasses.replace(free, base=base, degrees=degrees), there) >= MIN_TOKENS
        elif "leave it out" in message:
            assert count_tokens(free, there) >= MIN_TOKENS
        else:
            assert compute_max_tokens(asked, there) // TOKEN_STEP * TOKEN_STEP < MIN_TOKENS
        return
    assert plan.total_bytes <= there.free
    assert all(size >= 0 for size in plan.parts.values())
    assert plan.tokens == (asked.tokens or plan.tokens) >= (asked.tokens or MIN_TOKENS)


@examples(120)
@given(situations(), st.integers(1, 64 * GIB))
def test_more_memory_or_a_smaller_model_never_means_fewer_tokens(situation, more):
    asked, there = situation
    asked = dataclasses.replace(asked, fraction=None)
    tokens = count_tokens(asked, there)
    total = max(there.total, there.free + more)
    # SGLang's reserve on a GPU grows at 60 GiB: not across that.
    if there.kind == "cpu" or (total > 60 * GIB) == (there.total > 60 * GIB):
        assert count_tokens(asked, dataclasses.replace(there, free=there.free + more, total=total)) >= tokens
    smaller = dataclasses.replace(asked.shape, layers=max(1, asked.shape.layers // 2))
    assert count_tokens(dataclasses.replace(asked, shape=smaller), there) >= tokens
    assert count_tokens(dataclasses.replace(asked, extra_weights=asked.extra_weights + more), there) <= tokens
    if most := compute_max_tokens(asked, there):
        assert count_needed_bytes(asked, there, most, asked.count_activation_bytes()) <= there.free
        assert count_needed_bytes(asked, there, most + 1, asked.count_activation_bytes()) > there.free
        assert count_tokens(dataclasses.replace(asked, tokens=most), there) == most
    assert count_tokens(dataclasses.replace(asked, tokens=most + 1), there) == 0


# -- descriptions -------------------------------------------------------------------------------------------------


def test_gpus_as_described():
    assert measure_gpu_memory("8x80GB", 8).free == 80 * GIB and measure_gpu_memory("2x79.5G", 1).total == int(
        79.5 * GIB
    )
    for text in ("80GB", "0x80GB", "8x0GB", "8x80TB", "8x-1GB"):
        with pytest.raises(ValueError, match="e.g. 8x80GB"):
            measure_gpu_memory(text, 1)
    with pytest.raises(ValueError, match="8 ranks need 8 GPUs"):
        measure_gpu_memory("4x80GB", 8)


def test_models_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        read_config(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no config.json"):
        read_config(str(tmp_path))
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="not (JSON|a JSON object)"):
            read_config(str(tmp_path))


def test_preflight_says_it_once(tmp_path, capsys):
    """The plan and a profile say it; a profile of another layout is refused."""
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-30b-a3b.json").read_text())
    save(build(H100, A3B, 1, ("a test",), False), tmp_path / "tp1.json")
    save(build(H100, A3B, 2, ("a test",), False), tmp_path / "tp2.json")
    asked = ["--model-path", str(tmp_path), "--gpus", "8x80GB", "--dtype", "bfloat16", "--dp", "8"]
    assert preflight.main(asked) == 0
    assert capsys.readouterr().out.count("--tp 4 --dp 2 has room for 6.4 times as many: take it") == 1
    assert preflight.main([*asked, "--pat-profile", str(tmp_path / "tp1.json")]) == 0
    assert capsys.readouterr().out.count("times as fast when full (by the profile): take it") == 1
    assert preflight.main([*asked, "--pat-profile", str(tmp_path / "tp2.json")]) == 1
    assert "tp2.json is of tp2×dp4, not of tp1×dp8" in capsys.readouterr().err
