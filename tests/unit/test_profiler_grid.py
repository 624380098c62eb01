"""What the profiler plans: the grid's axes and levels, and what fits a budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler import budget, grid
from profiler.budget import Costs, parse_budget, plan
from profiler.errors import UsageError
from profiler.grid import Limits, Point
from sglang_pat.layout import ParallelLayout

pytestmark = pytest.mark.unit

LAYOUTS = (ParallelLayout(1, 4), ParallelLayout(2, 2), ParallelLayout(4, 1))
LIMITS = Limits(layouts=LAYOUTS, kv_tokens={1: 8192, 2: 16384, 4: 16384}, max_running=64, max_length=4000)


def costs(step=0.01, per_token=1e-6):
    """As learnt from a few exact measurements."""
    found = Costs()
    for tp in (1, 2, 4):
        for batch, context in ((1, 64), (8, 64), (8, 1024), (1, 1024)):
            found.saw_decode(tp, batch, batch * context, step + 1e-3 * batch + per_token * batch * context)
            found.saw_prefill(tp, batch * context, context, 1e-5 * batch * context)
    return found


@given(st.integers(1, 200))
def test_levels_are_those_of_bisection(count):
    levels = grid.levels(count)
    assert levels[0] == levels[-1] == 0
    for place, level in enumerate(levels):
        if level:
            lower = [i for i in range(count) if levels[i] < level]
            # A point lies between two of lower level, so leaving it out only widens one gap.
            assert min(lower) < place < max(lower)
    assert max(levels) <= count.bit_length()


def test_axes_are_read_and_checked():
    assert grid.parse("batch=1,2,4;context=64,128") == {"batch": (1, 2, 4), "context": (64, 128)}
    assert grid.parse(None) == {}
    assert grid.canonical(grid.parse("context=64;batch=1")) == "batch=1;context=64"
    for text, said in (
        ("batches=1", "axes are batch"),
        ("batch=1,x", "numbers separated by commas"),
        ("batch=2,1", "ascending"),
        ("batch=0,1", "at least 1"),
        ("context=20", "at least 48"),
        ("context=64,70", "16 tokens apart"),
        ("switch_context=128,200", "256 tokens apart"),
        ("batch=", "at least one number"),
    ):
        with pytest.raises(UsageError, match=said):
            grid.parse(text)


def test_only_points_that_the_pool_holds():
    axes = {"batch": (1, 16, 64, 128), "context": (64, 1024, 2048)}
    points = grid.points(grid.resolve(axes, LIMITS), LIMITS)
    for point in points:
        if point.kind != "switch":
            assert point.batch * point.context <= LIMITS.kv_tokens[point.tp]
            assert point.batch <= LIMITS.max_running
    decode = {(p.tp, p.batch, p.context) for p in points if p.kind == "decode" and p.replicas == 4 // p.tp}
    assert (2, 64, 64) in decode and (1, 16, 1024) not in decode and (4, 64, 1024) not in decode
    assert len({point.key for point in points}) == len(points)


def test_lone_replicas_only_where_there_are_several():
    points = grid.points(grid.resolve({}, LIMITS), LIMITS)
    lone = {(p.tp, p.batch) for p in points if p.kind == "decode" and p.replicas == 1 and p.tp < 4}
    assert lone == {(tp, batch) for tp in (1, 2) for batch in grid.LONE}
    pairs = {(p.tp, p.to_tp) for p in points if p.kind == "switch"}
    assert pairs == {(1, 2), (1, 4), (2, 4)}
    assert all(any(p.batch == 0 for p in points if (p.tp, p.to_tp) == pair) for pair in pairs)


def test_chains_have_ascending_contexts_and_stay_together():
    seen = []
    for point in grid.points(grid.resolve({}, LIMITS), LIMITS):
        if point.kind != "decode":
            continue
        if seen and seen[-1][0] == point.chain:
            assert point.context > seen[-1][1]
        else:
            assert point.chain not in [chain for chain, _ in seen]
        seen.append((point.chain, point.context))


def test_nothing_fits():
    tiny = Limits(layouts=LAYOUTS, kv_tokens={1: 64, 2: 128, 4: 256}, max_running=64, max_length=64)
    with pytest.raises(UsageError, match="64 KV tokens"):
        grid.resolve({"batch": (1,), "context": (64,)}, tiny)


def test_costs_reproduce_what_they_saw():
    found = costs()
    assert found.step_seconds(1, 4, 4 * 512) == pytest.approx(0.01 + 4e-3 + 1e-6 * 4 * 512, rel=0.02)
    assert found.prefill_seconds(2, 2048, 512) == pytest.approx(0.02048, rel=0.05)
    assert Costs().step_seconds(1, 1, 1) == 0.0


def test_with_time_enough_all_is_measured_in_full():
    points = grid.points(grid.resolve({}, LIMITS), LIMITS)
    made = plan(points, costs(), 1e6)
    assert list(made.points) == points and not made.left_out
    assert set(made.steps.values()) == {grid.STEPS}


@settings(deadline=None, max_examples=40)
@given(st.floats(1, 400))
def test_a_plan_keeps_to_its_time_and_gives_up_the_least_first(seconds):
    points = grid.points(grid.resolve({}, LIMITS), LIMITS)
    made = plan(points, costs(), seconds)
    assert made.seconds <= seconds
    assert [p for p in points if p in set(made.points)] == list(made.points), "the order changed"
    assert set(made.points) | set(made.left_out) == set(points)
    if made.points and made.left_out:
        highest = max(p.level for p in made.points)
        assert all(p.level >= highest for p in made.left_out), "a point of lower level was left out"
    assert all(grid.LEAST_STEPS <= steps <= grid.STEPS for steps in made.steps.values())


def test_fewer_steps_come_before_fewer_points():
    points = [Point(kind="decode", tp=1, replicas=4, batch=8, context=c, level=0) for c in (64, 128, 256)]
    slow = costs(step=0.5)
    full = budget.total(slow, points, float("inf"))
    made = plan(points, slow, 0.5 * full)
    assert len(made.points) == 3 and max(made.steps.values()) < grid.STEPS


def test_what_a_profile_needs_is_measured_in_any_case():
    points = grid.points(grid.resolve({}, LIMITS), LIMITS)
    must = frozenset(point.key for point in points if point.level == 0 and point.tp == 4)
    made = plan(points, costs(), -10.0, must)
    assert {point.key for point in made.points} == must


def test_prefix_in_the_cache_is_not_paid_again():
    chain = [Point(kind="decode", tp=1, replicas=4, batch=8, context=c, level=0) for c in (512, 1024)]
    apart = sum(budget.total(costs(), [point], 8.0) for point in chain)
    assert budget.total(costs(), chain, 8.0) < apart


def test_budget_is_read():
    assert [parse_budget(text) for text in ("90", "90s", "10m", "1.5h")] == [90, 90, 600, 5400]
    for text in ("", "m", "ten", "-5m", "0", "inf"):
        with pytest.raises(ValueError, match="10m"):
            parse_budget(text)
