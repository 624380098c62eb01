"""One pass of a sweep over its grid, on a stand-in for the engine."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest

from profiler import session
from profiler.grid import Grid, Limits
from profiler.store import Store
from sglang_pat.layout import ParallelLayout
from sglang_pat.predict.profile import DecodePoint, PrefillPoint

from .profiles_for_tests import FINGERPRINT, switch_sample

pytestmark = pytest.mark.unit

GRID = Grid(
    batch=(1, 4), context=(64, 160), lone=(1,), prefill_batch=(1,), prefill_length=(64,), switch_requests=(4,),
    switch_context=(128,),
)  # fmt: skip
LIMITS = Limits(
    layouts=(ParallelLayout(1, 2), ParallelLayout(2, 1)), kv_tokens={1: 8192, 2: 16384}, max_running=64,
    max_length=4096,
)  # fmt: skip


class Clock:
    """Goes on by a tenth of a second whenever it is read."""

    spent, budget = 0.0, 600.0

    @property
    def left(self) -> float:
        self.spent += 0.1
        return self.budget - self.spent


def sweep(monkeypatch, tmp_path, context_of) -> tuple[session.Session, Store]:
    """A whole session; ``context_of``: a point -> tokens that a request had while it was measured."""

    async def decode(rig, point, steps):
        found = DecodePoint(
            tp=point.tp, replicas=point.replicas, batch=point.batch, context=context_of(point), seconds=0.01,
            samples=(0.01,),
        )  # fmt: skip
        return found, 0.01

    async def prefill(rig, point):
        return PrefillPoint(
            tp=point.tp, replicas=point.replicas, batch=point.batch, length=point.context, seconds=0.01, samples=(0.01,)
        )

    async def switches(rig, point):
        about = {"requests": point.batch, "tokens": point.batch * point.context}
        return [switch_sample(a, b, **about) for a, b in ((point.tp, point.to_tp), (point.to_tp, point.tp))]

    async def reconfigure(tp):
        pass

    for function in (decode, prefill, switches):
        monkeypatch.setattr(session.measure, function.__name__, function)
    deployment = msgspec.structs.replace(FINGERPRINT, num_ranks=2, degrees=(1, 2))
    store = Store.fresh(tmp_path / "p.json", deployment, GRID, {})
    rig = SimpleNamespace(reconfigure=reconfigure, tp=1)
    made = session.Session(rig, store, GRID, LIMITS, Clock())
    asyncio.run(made.run(SimpleNamespace(following=lambda progress: nullcontext())))
    return made, store


def test_every_point_is_measured_and_decode_points_twice(monkeypatch, tmp_path):
    made, store = sweep(monkeypatch, tmp_path, lambda point: point.context - 3)
    assert len(store.profile.decode) == 10 and all(len(point.samples) == 2 for point in store.profile.decode)
    assert made.progress.done == made.progress.total and not made.progress.notes


def test_what_was_not_the_point_asked_for_is_not_measured_for_ever(monkeypatch, tmp_path):
    """As where the engine loses the tokens of its steps: it did with overlap scheduling."""
    made, store = sweep(monkeypatch, tmp_path, lambda point: 0)
    assert store.profile.decode == () and store.profile.machine["failed"] == 10
    assert made.progress.done == made.progress.total - 10
    assert made.progress.notes[-1] == (
        "decode tp2, batch 4 × 160 tokens on 1 replica: its requests had 0 tokens, as the engine counts them"
    )
