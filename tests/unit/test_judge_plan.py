"""How many layers a judge streams, and which: as few as must be, evenly spread."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.memory.memory_plan import GIB
from sglang_pat.memory.shapes import ModelShape
from stream_layers.judge_memory import (
    FEWEST,
    PLACES,
    CannotStream,
    JudgeMemory,
    order_layers,
    parse_count,
    spread_layers,
)

from .drawn import examples

pytestmark = pytest.mark.unit

LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, context=131072, item=2
)


@given(st.integers(0, 100), st.integers(1, 100))
def test_streamed_layers_are_evenly_spread(count, layers):
    count = min(count, layers)
    numbers = spread_layers(count, layers)
    assert len(numbers) == count and list(numbers) == sorted(set(numbers))
    assert all(0 <= number < layers for number in numbers)
    gaps = {after - before for before, after in zip((-1, *numbers), numbers, strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.integers(0, 40), st.integers(1, 40))
def test_further_layers_lie_between_those_that_are_streamed(count, layers):
    count = min(count, layers)
    order = order_layers(count, layers)
    assert sorted(order) == list(range(layers)) and order[:count] == spread_layers(count, layers)
    for more in range(max(count, 1), layers + 1):
        ends = [-1, *sorted(order[:more]), layers]
        runs = [after - before for before, after in pairwise(ends)]
        assert max(runs) <= max(2 * layers / (more + 1) + 2, layers / (count + 1) + 2)


@examples(300)
@given(
    budget=st.floats(0, 20).map(lambda gib: int(gib * GIB)),
    tokens=st.integers(1, 200_000),
    tp=st.sampled_from([1, 2, 4]),
)
def test_as_few_layers_as_must_be(budget, tokens, tp):
    memory = JudgeMemory(shape=LLAMA, tp=tp, budget=budget, tokens=tokens)

    def fits(count: int) -> bool:
        return memory.count_weight_bytes(count) + memory.kv_bytes <= budget

    try:
        count = memory.choose_count()
    except CannotStream as error:
        assert not fits(LLAMA.layers) and "\n" not in str(error)
        return
    assert fits(count)
    if count:
        assert FEWEST <= count <= LLAMA.layers and not fits(count - 1)


def test_more_layers_stay_for_shorter_sequences_and_with_more_memory():
    def choose(gib: float, tokens: int) -> int:
        return JudgeMemory(shape=LLAMA, tp=1, budget=int(gib * GIB), tokens=tokens).choose_count()

    assert [choose(gib, 8192) for gib in (17, 14, 10, 5)] == [0, 7, 17, 29]
    assert [choose(10, tokens) for tokens in (1024, 8192, 16384, 32768)] == [15, 17, 20, 25]


def test_the_layers_of_an_8b():
    memory = JudgeMemory(shape=LLAMA, tp=1, budget=0, tokens=0)
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) * 2
    assert LLAMA.layer_bytes(1) == layer
    whole = memory.count_weight_bytes(0)
    assert whole == pytest.approx(8.03e9 * 2, rel=0.001)
    assert [whole - memory.count_weight_bytes(n) for n in (PLACES, 3, 32)] == [0, layer, 30 * layer]


def test_no_room_says_what_would_fit():
    memory = JudgeMemory(shape=LLAMA, tp=1, budget=4 * GIB, tokens=131072)
    with pytest.raises(CannotStream) as caught:
        memory.choose_count()
    assert str(caught.value) == (
        "--stream-layers auto: with all 32 layers in host memory there is room for 10080 tokens of KV, and 131072 are "
        "needed: give a smaller --context-length or --max-total-tokens, a larger --mem-fraction-static, or the actor "
        "less memory"
    )


@pytest.mark.parametrize("text", ["", "-1", "0", "2", "3.5", "all", "٣"])
def test_a_wrong_number_is_refused(text):
    with pytest.raises(CannotStream, match="^here is .*, must be auto or a number from 3 on: streamed layers share 2"):
        parse_count(text, "here")


def test_right_numbers():
    assert [parse_count(text) for text in ("auto", "3", "32")] == [None, 3, 32]
