"""What comes in a pause, beside an update, or while memory is released: ``docs/pauses.md``, in any order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.drawn import examples

from .pausing_world import UPDATES, World

pytestmark = pytest.mark.contract

WHICH = st.integers(0, 5)
EVENT = st.one_of(
    st.tuples(st.just("generate"), st.sampled_from(["one", "stream", "batch", "n"])),
    st.tuples(st.sampled_from(["abort", "leave"]), WHICH),
    st.tuples(st.just("abort_all")),
    st.tuples(st.just("pause"), st.sampled_from(["in_place", "retract", "abort"])),
    st.tuples(st.just("go_on")),
    st.tuples(st.just("flush"), st.sampled_from([None, 1000.0])),
    st.tuples(st.just("update"), st.sampled_from(list(UPDATES)), st.booleans()),
    st.tuples(st.sampled_from(["release", "resume"]), st.sampled_from(["weights", "kv_cache"])),
    st.tuples(st.just("probe")),
)
BETWEEN = st.lists(st.sampled_from(["calm", "step", "take", "turn"]), max_size=3)


@given(st.lists(st.tuples(EVENT, BETWEEN), max_size=25))
@settings(examples(1000), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_everything_is_answered_in_any_order(monkeypatch, drawn):
    async def scene() -> None:
        world = World(monkeypatch)
        for (what, *arguments), between in drawn:
            getattr(world, what)(*arguments)
            for number, then in enumerate(between):
                if then == "calm":
                    await world.calm()
                    world.check()
                elif then == "step":
                    await world.rank.step(number)
                elif then == "take":
                    world.rank.take()
                else:
                    await asyncio.sleep(0)
        await world.end()

    asyncio.run(asyncio.wait_for(scene(), 60))
