"""The table of ``docs/results/engine.md``: what views of the weights leave to KV, and what arenas did."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sglang_pat.layout import ParallelLayout, candidate_layouts
from sglang_pat.memory import estimate
from sglang_pat.memory.demand import GIB
from sglang_pat.memory.room import by_fraction, chosen_tokens, kept, needed

from .test_memory_plan import shape

pytestmark = pytest.mark.unit
ENGINE = Path(__file__).parents[2] / "docs/results/engine.md"


@pytest.mark.parametrize(
    ("name", "tp", "row"),
    [
        ("llama-3.1-8b", 1, "15.0 GiB | 11.4 GiB | 427,776: needs 90.8 GiB | 261,632 | **346,880**"),
        ("qwen2.5-32b", 1, "61.0 GiB | 50.9 GiB | 25,088: needs 126.5 GiB | does not fit | **2,304**"),
        ("qwen2.5-32b", 2, "30.5 GiB | 21.8 GiB | 300,288: needs 97.3 GiB | 76,288 | **246,784**"),
    ],
)
def test_the_table_of_views_against_arenas(name, tp, row):
    base, supply = ParallelLayout(tp, 8 // tp), estimate.supply_of_machine("8x80GB", 8)
    views = estimate.demand_of(shape(name), base, supply)
    views = dataclasses.replace(views, degrees=views.shape.allowed(candidate_layouts(base)))
    weights = views.shape.weight_bytes(tp)
    linear = weights - 2 * views.shape.padded_vocab * views.shape.hidden * views.shape.item // tp
    arenas = dataclasses.replace(views, tail_weights=int(linear * sum(tp / degree for degree in views.degrees[1:])))
    before = dataclasses.replace(arenas, fraction=0.84)
    figures = [
        f"{weights / GIB:.1f} GiB",
        f"{arenas.tail_weights / GIB:.1f} GiB",
        f"{by_fraction(before, supply):,}: needs {needed(before, supply) / GIB:.1f} GiB",
        f"{tokens:,}" if (tokens := chosen_tokens(arenas, supply)) else "does not fit",
        f"**{chosen_tokens(views, supply):,}**",
    ]
    assert needed(before, supply) > supply.free and " | ".join(figures) == row
    assert row in ENGINE.read_text()


@pytest.mark.parametrize(
    ("degrees", "tail_graphs", "row"),
    [
        ((1, 8), 16, "| tp1 and tp8 (`threshold`) | 1.0 GiB | 0.8 GiB | 0.7 GiB | 2.4 GiB |"),
        ((1, 2, 4, 8), 16, "in the last three | 1.0 GiB | 3.1 GiB | 1.0 GiB | 5.1 GiB |"),
        ((1, 2, 4, 8), 256, "| the same with all graphs (`manual`) | 1.0 GiB | 3.1 GiB | 2.4 GiB | 6.5 GiB |"),
    ],
)
def test_the_table_of_what_sleep_keeps(degrees, tail_graphs, row):
    supply = estimate.supply_of_machine("8x80GB", 8)
    asked = estimate.demand_of(shape("llama-3.1-8b"), ParallelLayout(1, 8), supply)
    found = kept(dataclasses.replace(asked, degrees=degrees, tail_graph_batch=tail_graphs), supply)
    assert row.endswith(f"| {found / GIB:.1f} GiB |") and row in (ENGINE.parents[1] / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("tp", "graphs", "row"), [(1, 256, "TP1 | 1.0 GiB | | 0.5 GiB"), (8, 512, "TP8 | 1.0 GiB | 0.5 GiB | 1.0 GiB")]
)
def test_the_table_of_what_stock_keeps(tp, graphs, row):
    supply = estimate.supply_of_machine("8x80GB", 8)
    asked = estimate.demand_of(shape("llama-3.1-8b"), ParallelLayout(1, 8), supply)
    found = kept(dataclasses.replace(asked, degrees=(tp,), graph_batch=graphs), supply)
    assert f"| stock SGLang, {row} | {found / GIB:.1f} GiB |" in (ENGINE.parents[1] / "gpu.md").read_text()
