"""What moving the last responses of a round gains (``studies.repack``)."""

from __future__ import annotations

import numpy as np
import pytest

from studies import repack
from studies.modelled import LLAMA, make_h100

pytestmark = pytest.mark.unit

TIMES = make_h100(LLAMA)
DEGREES = [2, 4, 8]


def make_engine(*left: int, context: int = 100) -> repack.Engine:
    return repack.Engine(TIMES, DEGREES, np.full(len(left), context), np.array(left))


def test_an_engine_takes_its_best_degree_and_ends_with_its_longest_response():
    one = make_engine(10, 1000)
    assert one.seconds == pytest.approx(
        sum(min(TIMES.step_seconds(tp, 1, 100 + step) for tp in DEGREES) for step in range(10, 1000))
        + sum(
            min(TIMES.step_seconds(tp, -(-2 * tp // 8), (200 + 2 * step) * tp / 8 * (-(-2 * tp // 8) / (2 * tp / 8)))
                for tp in DEGREES)
            for step in range(10)
        ), rel=1e-3,
    )  # fmt: skip
    context, left = one.look(one.seconds * 0.999)
    assert len(left) == 1 and 0 < left[0] <= 2 and context[0] + left[0] == 1100
    assert len(one.look(one.seconds)[0]) == 0


def test_moving_loses_no_token():
    running = [engine.look(0.02) for engine in (make_engine(500, 900), make_engine(700), make_engine(30, 40))]
    whole = sum(left.sum() for _, left in running)
    assert all((context + left >= 100 + 30).all() for context, left in running) and whole > 0
    together = repack.move(TIMES, DEGREES, running, 1)
    apart = max(repack.Engine(TIMES, DEGREES, *one).seconds for one in running)
    assert apart < together, "more in a step, and what moves is computed again"


@pytest.mark.parametrize("engines", [2, 8])
def test_no_round_is_made_better_than_its_longest_response_allows(engines):
    task = repack.Task("8×H100, NVLink", "Llama-3.1-8B", "rollpacker", engines, 128, 1)
    found = repack.study(task)
    assert 0 <= found.sooner < 0.05
    assert 0 <= found.free <= found.free_moved[0] <= found.free_moved[1] < 1
    assert found.free < 1 - 1 / engines
