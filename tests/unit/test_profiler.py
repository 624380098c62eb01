"""A sweep: its grid, what it keeps, what it leaves out; windows of steps; the check between layouts; the report."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import random
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from profiler import grid as grids
from profiler import measure, report, sweep, validate
from profiler.grid import SWITCH_ROUNDS, Grid, Limits, Point, list_points, list_required_points
from profiler.measure import NotMeasured, TooSlow
from profiler.rig import Rig
from profiler.store import Store, check_asked, check_same, load_existing
from profiler.windows import decode_windows, measure_prefill_seconds
from sglang_pat.layout import ParallelLayout
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import MOST_POINTS, DecodePoint, PrefillPoint, Profile, describe_thinness
from sglang_pat.tools import commands
from sglang_pat.tools.commands import UsageError

from .profiles_for_tests import FINGERPRINT, decode_points, profile, switch_sample

pytestmark = pytest.mark.unit

LAYOUTS = (ParallelLayout(1, 4), ParallelLayout(2, 2), ParallelLayout(4, 1))
LIMITS = Limits(layouts=LAYOUTS, kv_tokens={1: 8192, 2: 16384, 4: 16384}, max_running=48, max_length=4000)
ALL = list_points(grids.resolve({}, LIMITS), LIMITS)

# -- grid --------------------------------------------------------------------------------------------


def test_axes_are_read_and_checked():
    assert grids.parse("batch=1,2,4;context=64,128") == {"batch": (1, 2, 4), "context": (64, 128)}
    assert grids.parse(None) == {}
    assert grids.format_axes(grids.parse("context=64;batch=1")) == "batch=1;context=64"
    for text, said in (
        ("batches=1", "axes are batch"),
        ("batch=1,x", "numbers separated by commas"),
        ("batch=2,1", "ascending"),
        ("context=20", "at least 48"),
        ("context=64,70", "16 tokens apart"),
        ("switch_context=128,200", "256 tokens apart"),
        ("batch=", "at least one number"),
    ):
        with pytest.raises(UsageError, match=said):
            grids.parse(text)


def test_only_points_that_the_pool_holds():
    found = list_points(grids.resolve({"batch": (1, 16, 48, 128), "context": (64, 1024, 2048)}, LIMITS), LIMITS)
    for point in found:
        if point.kind != "switch":
            assert point.batch * point.context <= LIMITS.kv_tokens[point.tp] and point.batch <= 48
    decode = {(p.tp, p.batch, p.context) for p in found if p.kind == "decode" and p.replicas == 4 // p.tp}
    assert (2, 48, 64) in decode and (1, 16, 1024) not in decode and (4, 48, 1024) not in decode
    assert len(set(found)) == len(found)
    tiny = Limits(layouts=LAYOUTS, kv_tokens={1: 64, 2: 128, 4: 256}, max_running=64, max_length=64)
    with pytest.raises(UsageError, match="64 KV tokens"):
        grids.resolve({"batch": (1,), "context": (64,)}, tiny)


def test_what_a_grid_has():
    lone = {(p.tp, p.batch) for p in ALL if p.kind == "decode" and p.replicas == 1 and p.tp < 4}
    assert lone == {(tp, batch) for tp in (1, 2) for batch in grids.LONE}, "only where there are several"
    pairs = {(p.tp, p.to_tp) for p in ALL if p.kind == "switch"}
    assert pairs == {(1, 2), (1, 4), (2, 4)}
    assert all(any(p.batch == 0 for p in ALL if (p.tp, p.to_tp) == pair) for pair in pairs)
    assert max(p.batch for p in ALL if p.kind == "decode") == 48, "the deployment's largest batch"


def test_layouts_take_turns_and_the_largest_batch_comes_early():
    decode = [p for p in ALL if p.kind == "decode" and p.replicas == 4 // p.tp]
    assert [(p.tp, p.batch) for p in decode[:6]] == [(1, 1), (2, 1), (4, 1), (4, 48), (2, 48), (1, 48)]
    assert all(one.context <= two.context for one, two in pairwise(decode))
    assert list_required_points(ALL) >= set(decode[:3]) and len(list_required_points(ALL)) == 3 + 3
    assert all(p.batch for p in list_required_points(ALL))


def test_no_more_points_than_a_profile_may_have():
    many = Grid(batch=tuple(range(1, 49)), context=tuple(range(48, 4000, 16)))
    roomy = Limits(layouts=LAYOUTS, kv_tokens=dict.fromkeys((1, 2, 4), 1 << 20), max_running=48, max_length=4096)
    with pytest.raises(UsageError, match=f"decode points, a profile has at most {MOST_POINTS}"):
        list_points(many, roomy)
    switches = Grid(
        batch=(1,), context=(64,), switch_requests=tuple(range(1, 37)), switch_context=(128, 512, 1024, 2048)
    )
    count = sum(point.kind == "switch" for point in list_points(switches, roomy))
    assert 2 * SWITCH_ROUNDS * count <= MOST_POINTS, "each is measured there and back, several times"
    with pytest.raises(UsageError, match="switch points, a profile has at most"):
        list_points(dataclasses.replace(switches, switch_requests=tuple(range(1, 64))), roomy)


def test_budget_is_read():
    assert [sweep.parse_budget(text) for text in ("90", "90s", "10m", "1.5h")] == [90, 90, 600, 5400]
    for text in ("", "m", "ten", "-5m", "0", "inf"):
        with pytest.raises(UsageError, match="10m"):
            sweep.parse_budget(text)


@pytest.mark.parametrize("flags", [["--pat-speculate", "4"], ["--pat-speculate=auto"]])
def test_a_sweep_with_drafts_is_refused(flags):
    with pytest.raises(UsageError, match="--pat-speculate: a profile is of steps without drafts; leave it out"):
        sweep.parse(["--model-path", "M", "--out", "profile.json", *flags])


# -- the profile while it grows -----------------------------------------------------------------------

GRID = Grid(
    batch=(1, 4), context=(64, 160), lone=(1,), prefill_batch=(1,), prefill_length=(64,), switch_requests=(4,),
    switch_context=(128,),
)  # fmt: skip
ASKED = "batch=1,4;context=64,160"


def store(path, **parts) -> Store:
    return Store(
        path, Profile(**{"fingerprint": FINGERPRINT, "grid": GRID.as_lists(), "machine": {"grid": ASKED}} | parts)
    )


def decode(batch, context, seconds=0.01):
    return DecodePoint(tp=1, replicas=4, batch=batch, context=context, seconds=seconds, samples=(seconds,))


def test_a_store_knows_what_it_has(tmp_path):
    kept = store(tmp_path / "p.json")
    assert kept.list_done() == set()
    kept.add(decode(1, 61), 5.0)  # a few tokens off the grid's 64
    kept.add(PrefillPoint(tp=1, replicas=4, batch=2, length=256, seconds=0.1, samples=(0.1,)), 7.0)
    kept.add([switch_sample(1, 2, 8, 8 * 150, kv=1e-3), switch_sample(2, 1, 8, 8 * 160, kv=1e-3)], 9.0)
    kept.add([switch_sample(2, 4, 0, 0, install=1e-3)], 10.0)
    expected = {
        Point(kind="decode", tp=1, replicas=4, batch=1, context=64),
        Point(kind="prefill", tp=1, replicas=4, batch=2, context=256),
        Point(kind="switch", tp=1, to_tp=2, replicas=4, batch=8, context=128),
        Point(kind="switch", tp=2, to_tp=4, replicas=2, batch=0, context=0),
    }
    assert kept.list_done() == expected
    again = load_existing(tmp_path / "p.json")
    assert Store(tmp_path / "p.json", again).list_done() == expected
    assert again.machine["spent_seconds"] == 10.0 and not again.complete
    check_asked(tmp_path, again, ASKED)
    check_same(tmp_path, again, msgspec.structs.replace(FINGERPRINT, kv_tokens=1, max_running=1))
    with pytest.raises(UsageError, match="degrees"):
        check_same(tmp_path, again, msgspec.structs.replace(FINGERPRINT, degrees=(1, 4)))


def test_the_median_over_all_visits_counts(tmp_path):
    kept = store(tmp_path / "p.json")
    for batch, seconds in ((4, 0.01), (1, 0.01), (4, 0.02), (4, 0.008), (4, 0.009)):
        kept.add(decode(batch, 66, seconds), 1.0)
    found = profiles.load(tmp_path / "p.json").decode
    assert [(p.batch, p.seconds) for p in found] == [(4, 0.0095), (1, 0.01)]
    assert found[0].samples == (0.01, 0.02, 0.008, 0.009)


# -- a whole sweep, on a stand-in for the engine ------------------------------------------------------


def run_sweep(monkeypatch, tmp_path, seconds=0.01, budget=600.0, off=-3, slow=lambda point: False, refused=()):
    """A sweep, its store, and the points that were tried.

    Args:
        seconds: that a point takes; ``off``: tokens by which requests differ from what was asked; ``slow``: points that
            take longer than they may; ``refused``: degrees that the engine does not go to.
    """
    tried, now = [], [100.0]

    async def one(rig, point, limit):
        tried.append(point)
        now[0] += seconds
        if slow(point):
            raise TooSlow(f"{point}: takes over {limit:.0f} s")
        what = dict(tp=point.tp, replicas=point.replicas, batch=point.batch, seconds=0.01, samples=(0.01,))
        if point.kind == "decode":
            return DecodePoint(context=max(0, point.context + off), **what)
        if point.kind == "prefill":
            return PrefillPoint(length=point.context, **what)
        about = {"requests": point.batch, "tokens": point.batch * point.context}
        return [switch_sample(a, b, **about) for a, b in ((point.tp, point.to_tp), (point.to_tp, point.tp))]

    async def decoded(rig, point, steps=0, share=0.0, limit=0.0):
        if steps:
            raise NotMeasured("warming up")
        return await one(rig, point, limit)

    async def switch(tp):
        if tp in refused:
            raise RuntimeError("rank 1: no memory")

    monkeypatch.setattr(measure, "decode", decoded)
    monkeypatch.setattr(measure, "measure_prefill", one)
    monkeypatch.setattr(measure, "measure_switches", one)
    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])
    mark = msgspec.structs.replace(FINGERPRINT, num_ranks=2, degrees=(1, 2))
    kept = store(tmp_path / "p.json", fingerprint=mark)
    limits = Limits(layouts=(ParallelLayout(1, 2), ParallelLayout(2, 1)), kv_tokens={1: 8192, 2: 16384},
                    max_running=64, max_length=4096)  # fmt: skip
    speaker = SimpleNamespace(show_progress=lambda line: nullcontext())
    rig = Rig(SimpleNamespace(tokenizer_manager=SimpleNamespace(model_config=None), async_reconfigure=switch), 1.0)
    made = sweep.Sweep(rig, kept, limits, budget, speaker, now[0])
    asyncio.run(made.run())
    return made, kept, tried


def test_every_point_is_measured_and_decode_points_twice(monkeypatch, tmp_path):
    made, kept, _ = run_sweep(monkeypatch, tmp_path)
    assert len(kept.profile.decode) == 10 and all(len(point.samples) == 2 for point in kept.profile.decode)
    assert made.done == made.total and not made.notes and describe_thinness(kept.profile) == ""
    assert kept.list_done() == set(made._points)


def test_without_time_only_what_a_profile_needs_is_measured(monkeypatch, tmp_path):
    made, kept, tried = run_sweep(monkeypatch, tmp_path, seconds=50.0, budget=60.0)
    assert set(tried) == list_required_points(made._points) and made.done == len(tried)
    assert kept.profile.machine["left_out"] == made.total - len(tried)
    thin = f"{len(tried)} of {made.total} points"
    assert thin in describe_thinness(kept.profile) and thin in report.format_page(kept.profile, None)


def test_what_is_beyond_a_slow_point_is_not_tried(monkeypatch, tmp_path):
    """A profile goes on there with the last slope."""
    made, kept, tried = run_sweep(
        monkeypatch, tmp_path, slow=lambda p: p.kind == "decode" and (p.tp, p.batch) == (2, 4)
    )
    slow = [p for p in tried if p.kind == "decode" and (p.tp, p.batch) == (2, 4)]
    assert [p.context for p in slow] == [64] and made.left_out == 1
    assert kept.profile.machine["failed"] == 1 and "takes over" in made.notes[0]


def test_what_was_not_the_point_asked_for_is_not_kept(monkeypatch, tmp_path):
    """An engine may lose the tokens of its steps: it did with overlap scheduling."""
    made, kept, _ = run_sweep(monkeypatch, tmp_path, off=-1000)
    assert kept.profile.decode == () and kept.profile.machine["failed"] == 10
    assert "its requests had 0 tokens" in made.notes[-1]


def test_a_switch_that_is_aborted_does_not_end_the_sweep(monkeypatch, tmp_path):
    """A sweep that goes on comes to the same switch again."""
    made, kept, _ = run_sweep(monkeypatch, tmp_path, refused=[2])
    assert {point.tp for point in kept.profile.decode} == {1} and kept.profile.prefill
    assert any(note.endswith("no switch to tp2: rank 1: no memory") for note in made.notes)


# -- windows ------------------------------------------------------------------------------------------


def steps(rank, count, seconds, requests, *, begin=0.0, tp=1, kind="decode", tokens=100):
    same = dict(rank=rank, tp=tp, kind=kind, seconds=seconds, requests=requests, tokens=tokens)
    return [same | {"at": begin + (i + 1) * seconds} for i in range(count)]


def test_only_full_batches_count():
    trace = steps(0, 3, 0.5, 2) + steps(0, 64, 0.01, 4, begin=1.5, tokens=400) + steps(0, 2, 0.005, 3, begin=2.14)
    samples, context = decode_windows(trace, tp=1, replicas=1, batch=4)
    assert samples == pytest.approx((0.01, 0.01, 0.01)) and context == 100
    assert decode_windows(trace, tp=1, replicas=1, batch=5) is None
    assert decode_windows(trace, tp=2, replicas=1, batch=4) is None
    assert decode_windows(trace[:10], tp=1, replicas=1, batch=4) is None, "too few steps"


def test_several_replicas_count_only_while_all_are_full():
    trace = steps(0, 100, 0.01, 4) + steps(1, 50, 0.02, 4, begin=0.5)
    samples, _ = decode_windows(trace, tp=1, replicas=2, batch=4)
    # From 0.58 s (rank 1 is warm) to 1.0 s (rank 0 is done): 42 steps of rank 0, 21 of rank 1.
    assert samples == pytest.approx((0.015,) * 3)
    assert decode_windows(trace, tp=1, replicas=4, batch=4) is None


def test_a_lone_replica_counts_once_the_others_are_silent():
    trace = steps(0, 30, 0.02, 2) + steps(0, 30, 0.01, 2, begin=0.6) + steps(1, 30, 0.02, 2)
    samples, _ = decode_windows(trace, tp=1, replicas=1, batch=2)
    assert samples == pytest.approx((0.01,) * 3)


def test_one_disturbed_window_is_outvoted():
    trace = steps(0, 20, 0.01, 1) + steps(0, 1, 1.0, 1, begin=0.2) + steps(0, 20, 0.01, 1, begin=1.2)
    samples, _ = decode_windows(trace, tp=1, replicas=1, batch=1)
    assert sorted(samples)[1] == pytest.approx(0.01) and max(samples) > 0.1


def test_prefill_of_a_batch():
    def prefills(rank, *shapes):
        return [dict(rank=rank, tp=1, kind="prefill", at=0, seconds=s, requests=n, tokens=t) for n, t, s in shapes]

    asked = dict(tp=1, replicas=2, batch=4, length=512)
    assert measure_prefill_seconds(prefills(0, (4, 2048, 0.8)) + prefills(1, (4, 2047, 0.6)), **asked) == pytest.approx(
        0.7
    )
    chunks = prefills(0, (1, 512, 0.2), (3, 1536, 0.6)) + prefills(1, (4, 2048, 0.8))
    assert measure_prefill_seconds(chunks, **asked) == pytest.approx(0.8)
    uneven = prefills(0, (5, 2560, 1.0)) + prefills(1, (3, 1536, 0.6))
    assert measure_prefill_seconds(uneven, **asked) is None


class SlowRig:
    """An engine whose requests do not end; each look at the trace finds ``made`` more steps."""

    def __init__(self, made):
        self.layouts, self.made, self.steps, self.aborted = LAYOUTS[2:], made, 0, 0

    def sample_tokens(self, count):
        return [0] * count

    def inject(self, prompts):
        pass

    def send(self, prompts, answers):
        return [asyncio.ensure_future(asyncio.sleep(60)) for _ in prompts]

    async def flush(self):
        pass

    async def read_trace(self):
        self.steps += self.made
        return steps(0, self.made, 0.1, 2, begin=0.1 * self.steps, tp=4, tokens=400)

    async def abort(self, tasks):
        self.aborted += len(tasks)
        for task in tasks:
            task.cancel()


class RecordingRig(SlowRig):
    """Keeps what is sent; draws tokens as the real one does."""

    def __init__(self, layouts):
        super().__init__(made=0)
        self.layouts, self.sent = layouts, []
        self._random, self.model = random.Random(0), SimpleNamespace(vocab_size=50_000)

    sample_tokens = Rig.sample_tokens

    def send(self, prompts, answers):
        self.sent.append(prompts)
        return super().send(prompts, answers)


def test_no_two_requests_of_a_batch_are_alike():
    """The time of a mixture depends on how many experts its tokens choose: equal rows would all choose the same ones.

    Injected KV may be the same for all, so each needs a last token of its own; sampled, not greedy, they stay apart.
    """
    for tp, replicas in ((4, 1), (1, 4), (1, 1)):
        rig = RecordingRig(LAYOUTS)
        point = Point(kind="decode", tp=tp, replicas=replicas, batch=32, context=200)
        with pytest.raises(TooSlow):
            asyncio.run(measure.decode(rig, point, share=0.001, limit=0.002))
        rows = rig.sent[0]
        assert len(rows) == 32 * 4 // tp and len({row[-1] for row in rows}) >= len(rows) - 2
        assert len({tuple(row[:-1]) for row in rows}) == 32, "one for each place; replicas have the same ones"
    assert sweep.TEMPERATURE == 1.0


def test_where_a_step_is_slow_few_of_them_do():
    point = Point(kind="decode", tp=4, replicas=1, batch=2, context=200)
    rig = SlowRig(made=5)
    found = asyncio.run(measure.decode(rig, point, share=0.02, limit=5.0))
    assert found.seconds == pytest.approx(0.1) and found.context == 200 and rig.aborted == 2
    assert rig.steps == 5 + 2 * 5, "5 are not enough: 4 do not count"
    with pytest.raises(TooSlow, match="takes over 0 s"):
        asyncio.run(measure.decode(SlowRig(made=0), point, share=0.02, limit=0.1))


# -- the check between layouts ------------------------------------------------------------------------


def make_trace(predictor, tp, factor, count=60):
    """A draining batch on every replica that takes ``factor`` times what is predicted."""
    made = []
    for rank in range(4 // tp):
        at = 0.0
        for i in range(count):
            requests, tokens = (4, 800 + 4 * i) if i < count // 2 else (2, 600 + 2 * i)
            seconds = factor * predictor.step_seconds(tp, requests, tokens, 4 // tp)
            at += seconds
            made += [dict(rank=rank, tp=tp, kind="decode", at=at, seconds=seconds, requests=requests, tokens=tokens)]
    return made


@pytest.mark.parametrize("tp", [1, 4])
def test_slowness_of_a_run(tp):
    predictor = Predictor(profile())
    for factor in (1.0, 1.3):
        assert validate.compute_slowdown(make_trace(predictor, tp, factor), predictor, tp) == pytest.approx(factor)


def test_a_step_is_predicted_for_the_replicas_at_work():
    made = decode_points(lambda tp, n, b, c: 0.01 * n, (1, 4), (64, 512), layouts=((1, 1), (1, 4), (2, 2), (4, 1)))
    alone = steps(0, 10, 0.01, 1) + steps(1, 10, 0.02, 1, begin=5.0)
    assert validate.compute_slowdown(alone, Predictor(profile(decode=made)), 1) == pytest.approx(1.5)


def test_what_layouts_have_in_common_is_told_from_what_is_between_them():
    """Turns of a machine that is 10, 30 and 20% slower; tp=2 is another 8% slower, give or take 1%."""
    speeds = {"tp1×dp4": [1.1, 1.3, 1.2], "tp2×dp2": [1.1 * 1.08, 1.3 * 1.09, 1.2 * 1.07]}
    found = validate.compare_layouts(speeds)
    assert found.common == pytest.approx(0.245, abs=0.01)
    assert found.beside == pytest.approx({"tp1×dp4": -0.0377, "tp2×dp2": 0.0392}, abs=0.001)
    assert found.error == pytest.approx(np.log(1.08) / 2**0.5, abs=0.001) and 0.002 < found.noise < 0.006
    noisy = validate.compare_layouts({"a": speeds["tp1×dp4"], "b": speeds["tp1×dp4"][::-1]})
    assert noisy.error == 0 < noisy.noise


# -- the report ---------------------------------------------------------------------------------------


def make_profile(**parts):
    """Measured, with samples, lone replicas and switches."""
    decode = decode_points(lambda tp, n, b, c: 4e-3 / tp + 2e-4 * b * tp + 1e-8 * b * c, (1, 2, 8, 32), (64, 512, 4096))
    decode += decode_points(lambda tp, n, b, c: 3e-3 / tp, (1, 2), (64, 512), layouts=((1, 1), (2, 1)))
    switches = tuple(
        switch_sample(a, b, n, n * 128, kv=1e-3, install=1e-2) for a, b in ((1, 4), (4, 1)) for n in (0, 4)
    )
    return profile(**{"decode": decode, "switches": switches, "grid": {"batch": [1, 2]}} | parts)


@pytest.mark.long
def test_a_report_is_one_page(tmp_path):
    path, folder = tmp_path / "p.json", tmp_path / "a" / "report"
    profiles.save(make_profile(), path)
    assert report.main([str(path), "--out", str(folder)]) == 0
    assert [file.name for file in folder.iterdir()] == ["index.html"]
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "tp1 → tp4" in page and "heads4/4" in page
    assert 'src="http' not in page and "<link" not in page and "<script" not in page
    between = validate.compare_layouts({"tp1×dp4": [1.0, 1.1], "tp4×dp1": [1.2, 1.1]})
    (folder / "validation.json").write_bytes(msgspec.json.encode({"between": between, "table": []}))
    assert report.main([str(path), "--out", str(folder)]) == 0
    assert "error between layouts" in (folder / "index.html").read_text()


@pytest.mark.parametrize(
    "parts",
    [
        {"decode": decode_points(lambda *_: 1e-3, (1,), (64,))},
        {"decode": decode_points(lambda *_: 1e-3, (2, 4), (64, 128), layouts=((2, 2),)), "switches": ()},
        {"kind": "modelled", "sources": ("somewhere <b>",), "prefill": (), "complete": False},
    ],
    ids=["one point", "one layout", "modelled, interrupted"],
)
def test_a_report_of_little(parts):
    page = report.format_page(make_profile(**parts), None)
    assert "data:image/png;base64," in page
    assert "somewhere &lt;b&gt;" in page or "sources" not in parts
    assert ("interrupted sweep" in page) == (parts.get("complete") is False)


def test_which_layout_is_fastest():
    seconds = lambda tp, n, batch, c: {1: 0.01, 2: 0.1, 4: 0.002 * batch + 0.005}[tp]  # noqa: E731
    crossing = Predictor(profile(decode=decode_points(seconds, (1, 4), (128, 1024))))
    assert report.find_fastest(crossing, [1, 2, 4], 128, 8) == "fastest are tp4 up to 2, tp1 with more requests"


# -- bad input to the three commands ------------------------------------------------------------------


def test_bad_input_is_one_line(tmp_path, capsys):
    good, half, modelled = (tmp_path / name for name in ("good.json", "empty.json", "modelled.json"))
    profiles.save(profile(), good)
    profiles.save(profile(decode=(), complete=False), half)
    profiles.save(profile(kind="modelled"), modelled)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "validation.json").write_text("[]")
    (tmp_path / "config.json").write_text("{}")
    sweeping = ["profiler.sweep", "--model-path", tmp_path, "--out", tmp_path / "p.json"]
    model = ["--model-path", tmp_path / "bad"]
    cases = [
        (["profiler.sweep", "--out", "x.json"], "--model-path"),
        ([*sweeping, "--budget", "soon"], "--budget 'soon'"),
        ([*sweeping, "--grid", "batch=1;height=3"], "axes are batch"),
        ([*sweeping[:3], "--out", tmp_path / "no" / "p.json"], "does not exist"),
        ([*sweeping[:3], "--out", tmp_path], "is a folder"),
        ([*sweeping[:3], "--out", modelled], "modelled profile"),
        ([*sweeping, "--pat-policy", "survival"], "--pat-policy: the profiler decides"),
        (["profiler.sweep", "--model-path", tmp_path / "none", "--out", "x.json"], "no such folder"),
        (["profiler.report", half, "--out", tmp_path / "r"], "no decode times"),
        (["profiler.report", good], "--out"),
        (["profiler.report", good, "--out", good / "r"], "give another place"),
        (["profiler.report", good, "--out", tmp_path / "bad"], "validation.json: expected object, got array"),
        (["profiler.validate", modelled, *model], "modelled profile"),
        (["profiler.validate", good, *model], "there is no config.json"),
        (["profiler.validate", good, *model, "--requests", "1"], "--requests 1"),
    ]
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for (module, *arguments), said in cases:
        code = commands.run(module, importlib.import_module(module).main, list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert code == 2 and not out and len(err.splitlines()) == 1 and said in err, (said, err)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == kept
