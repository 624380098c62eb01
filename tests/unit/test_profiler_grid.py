"""What the profiler plans: the grid's axes and levels, and what fits a budget."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import budget, grid
from profiler.budget import Costs, coverage, parse_budget, plan, worth
from profiler.grid import Limits
from profiler.points import Point, levels, points
from profiler.session import check_number
from sglang_pat.layout import ParallelLayout
from sglang_pat.predict.profile import MOST_POINTS
from sglang_pat.tools.commands import UsageError

from .drawn import examples

pytestmark = pytest.mark.unit

LAYOUTS = (ParallelLayout(1, 4), ParallelLayout(2, 2), ParallelLayout(4, 1))
LIMITS = Limits(layouts=LAYOUTS, kv_tokens={1: 8192, 2: 16384, 4: 16384}, max_running=64, max_length=4000)


GRID = grid.resolve({}, LIMITS)
ALL = points(GRID, LIMITS)


def costs(step=0.01, per_token=1e-6, prefill=1e-5):
    """As learnt from a few exact measurements."""
    found = Costs()
    for tp in (1, 2, 4):
        for batch, context in ((1, 64), (8, 64), (8, 1024), (1, 1024)):
            found.saw_decode(tp, batch, batch * context, step + 1e-3 * batch + per_token * batch * context)
            found.saw_prefill(tp, batch * context, context, prefill * batch * context)
    return found


@given(st.integers(1, 200))
def test_levels_are_those_of_bisection(count):
    level_of = levels(count)
    assert level_of[0] == level_of[-1] == 0
    for place, level in enumerate(level_of):
        if level:
            lower = [i for i in range(count) if level_of[i] < level]
            # A point lies between two of lower level, so leaving it out only widens one gap.
            assert min(lower) < place < max(lower)
    assert max(level_of) <= count.bit_length()


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
    found = points(grid.resolve(axes, LIMITS), LIMITS)
    for point in found:
        if point.kind != "switch":
            assert point.batch * point.context <= LIMITS.kv_tokens[point.tp]
            assert point.batch <= LIMITS.max_running
    decode = {(p.tp, p.batch, p.context) for p in found if p.kind == "decode" and p.replicas == 4 // p.tp}
    assert (2, 64, 64) in decode and (1, 16, 1024) not in decode and (4, 64, 1024) not in decode
    assert len({point.key for point in found}) == len(found)


def test_lone_replicas_only_where_there_are_several():
    found = ALL
    lone = {(p.tp, p.batch) for p in found if p.kind == "decode" and p.replicas == 1 and p.tp < 4}
    assert lone == {(tp, batch) for tp in (1, 2) for batch in grid.LONE}
    pairs = {(p.tp, p.to_tp) for p in found if p.kind == "switch"}
    assert pairs == {(1, 2), (1, 4), (2, 4)}
    assert all(any(p.batch == 0 for p in found if (p.tp, p.to_tp) == pair) for pair in pairs)


def test_points_of_a_layout_stay_together():
    kinds = [(p.kind, p.tp) for p in ALL if p.kind != "switch"]
    assert len(dict.fromkeys(kinds)) == len([a for a, b in zip(kinds, [None, *kinds], strict=False) if a != b])


@given(st.floats(0.01, 1e6), st.floats(1e-6, 0.1))
def test_no_point_takes_too_much_of_the_time(seconds, prefill):
    slow = costs(prefill=prefill)
    found = points(GRID, LIMITS, lambda point: worth(slow, point, seconds, len(ALL)))
    assert {p.key for p in found} <= {p.key for p in ALL}
    firsts = {(p.kind, p.tp, p.to_tp, p.replicas) for p in ALL}
    assert {(p.kind, p.tp, p.to_tp, p.replicas) for p in found} == firsts, "something is not known at all"
    dear = [p for p in found if not worth(slow, p, seconds, len(ALL))]
    assert len(dear) <= len(firsts) + 3, "only the first of a chain, and a switch with nobody alive"
    kept = [p for p in found if p.kind == "decode" and p.tp == 4]
    assert kept[0].level == 0 == kept[-1].level, "levels are those of what is left"
    if seconds > 1e5 and prefill < 1e-5:
        assert found == ALL


def test_a_slow_start_with_long_prompts_is_learnt():
    slow = Costs()
    for batch, context in ((1, 64), (8, 64), (1, 512)):
        slow.saw_decode(1, batch, batch * context, 0.08 + 0.01 * batch)
        slow.saw_begin(1, batch * context, context, 4e-6 * batch * context**2)
    assert slow.begin_seconds(1, 12 * 3072, 3072) == pytest.approx(4e-6 * 12 * 3072**2, rel=0.1)
    point = Point(kind="decode", tp=1, replicas=4, batch=12, context=3072, level=0)
    assert not worth(slow, point, 600, len(ALL))
    assert worth(slow, Point(kind="decode", tp=1, replicas=4, batch=12, context=256, level=0), 600, len(ALL))


def test_a_short_sweep_measures_the_largest_batch():
    """A profile without it is flat there, and policies believe it."""
    axes = {"batch": (1, 4, 16, 64), "context": (64,), "lone": (1,), "prefill_batch": (1,), "prefill_length": (32,)}
    small, slow, seconds = grid.resolve(axes, LIMITS), Costs(), 60.0
    for tp, batch in product((1, 2, 4), (1, 8)):
        slow.saw_decode(tp, batch, 64 * batch, 0.1 + 0.0025 * batch)
        slow.saw_prefill(tp, 32 * batch, 32, 0.1 * batch)
    count = len(points(small, LIMITS))
    todo = points(small, LIMITS, lambda point: worth(slow, point, seconds, count))
    first, left, measured = 0.2 * seconds, seconds, set()
    while (now := coverage(todo, slow, first, left, frozenset())).points:
        point, took = now.points[0], now.seconds / len(now.points)
        measured.add((point.kind, point.tp, point.batch))
        todo, first, left = [p for p in todo if p.key != point.key], first - took, left - took
    assert {("decode", tp, 64) for tp in (1, 2, 4)} <= measured


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
    found = ALL
    made = plan(found, costs(), 1e6)
    assert list(made.points) == found and not made.left_out
    assert set(made.steps.values()) == {grid.STEPS}


@examples(40)
@given(st.floats(1, 400))
def test_a_plan_keeps_to_its_time_and_gives_up_the_least_first(seconds):
    found = ALL
    made = plan(found, costs(), seconds)
    assert made.seconds <= seconds
    assert [p for p in found if p in set(made.points)] == list(made.points), "the order changed"
    assert set(made.points) | set(made.left_out) == set(found)
    if made.points and made.left_out:
        highest = max(p.level for p in made.points)
        assert all(p.level >= highest for p in made.left_out), "a point of lower level was left out"
    assert all(grid.LEAST_STEPS <= steps <= grid.STEPS for steps in made.steps.values())


def test_fewer_steps_come_before_fewer_points():
    found = [Point(kind="decode", tp=1, replicas=4, batch=8, context=c, level=0) for c in (64, 128, 256)]
    slow = costs(step=0.5)
    full = budget.total(slow, found, float("inf"))
    made = plan(found, slow, 0.5 * full)
    assert len(made.points) == 3 and max(made.steps.values()) < grid.STEPS


def test_what_a_profile_needs_is_measured_in_any_case():
    found = ALL
    must = frozenset(point.key for point in found if point.level == 0 and point.tp == 4)
    made = plan(found, costs(), -10.0, must)
    assert {point.key for point in made.points} == must


def test_budget_is_read():
    assert [parse_budget(text) for text in ("90", "90s", "10m", "1.5h")] == [90, 90, 600, 5400]
    for text in ("", "m", "ten", "-5m", "0", "inf"):
        with pytest.raises(ValueError, match="10m"):
            parse_budget(text)


def test_no_more_points_than_a_profile_may_have():
    check_number(ALL)
    many = [Point(kind="decode", tp=1, replicas=4, batch=n + 1, context=64, level=0) for n in range(MOST_POINTS + 1)]
    check_number(many[:-1])
    with pytest.raises(UsageError, match=f"{MOST_POINTS + 1} decode points, a profile has at most {MOST_POINTS}"):
        check_number(many)
