"""A judge gives up layers when memory is short, and takes them back when there is room and steps wait for copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_layers.judge_memory import FEWEST, count_saved
from stream_layers.residency import STEPS, Residency

from .drawn import examples

pytestmark = pytest.mark.unit

MIB = 1 << 20
SHORT, LONG = 0.07, 0.5
"""Seconds of a step that waits for its copies (8 layers of 8.3 ms), and of one that hides them."""
NOW = Residency(
    streamed=8, least=4, layers=32, layer_bytes=416 * MIB, free=4096 * MIB, kept=4096 * MIB, copy_seconds=0.0083,
    steps=(SHORT,) * STEPS,
)  # fmt: skip


@pytest.mark.parametrize(
    "free,count",
    [
        (2048, 8),  # half of the room is left
        (2047, 13),  # 2,049 MiB lack: the room of five layers
        (0, 18),
        (4096 + 415, 8),
        (4096 + 416, 7),
        (4096 + 4 * 416, 4),
        (80 * 1024, 4),  # an actor sleeps: what it left is not the judge's
    ],
)
def test_layers_follow_the_free_memory(free, count):
    assert replace(NOW, free=free * MIB).choose_count() == count


def test_layers_come_back_only_while_steps_wait_for_copies():
    def choose(*steps: float) -> int:
        return replace(NOW, free=80 * 1024 * MIB, steps=steps).choose_count()

    assert choose(*[LONG] * STEPS) == 8
    assert choose(*[SHORT] * (STEPS - 1)) == 8, "too few were seen since the last change"
    assert choose(*[LONG] * 40, *[SHORT] * 24) == 8, "8% of the time"
    assert choose(*[LONG] * 30, *[SHORT] * 34) == 4, "14% of the time"


def test_long_steps_give_up_layers_no_later():
    assert replace(NOW, free=0, steps=[LONG] * STEPS).choose_count() == 18


def test_a_judge_that_fits_gives_up_three_layers_to_free_one():
    whole = replace(NOW, streamed=0, least=0, free=2047 * MIB)
    assert replace(whole, layer_bytes=4096 * MIB).choose_count() == FEWEST
    back = replace(NOW, streamed=FEWEST, least=0, free=4096 * MIB + NOW.layer_bytes, steps=[0.026] * STEPS)
    assert back.choose_count() == 0


counts = st.sampled_from([0, *range(FEWEST, 33)])


@examples(300)
@given(counts, counts, st.integers(0, 9000), st.integers(0, 9000), st.sampled_from([SHORT, LONG]))
def test_a_change_leaves_the_room_that_was_kept_or_all_that_can_be(streamed, least, free, kept, seconds):
    streamed = max(streamed, least)
    now = replace(NOW, streamed=streamed, least=least, free=free * MIB, kept=kept * MIB, steps=[seconds] * STEPS)
    count = now.choose_count()
    assert count == 0 or FEWEST <= count <= 32
    assert count >= least
    left = now.free + (count_saved(count) - count_saved(streamed)) * now.layer_bytes
    assert count == streamed or left >= now.kept or count == 32
    after = replace(now, streamed=count, free=left)
    assert after.choose_count() == count, "one change is enough"
