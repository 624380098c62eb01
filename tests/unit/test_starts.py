"""Where ``survival`` starts a round on modelled machines (``studies.starts``)."""

from __future__ import annotations

import pytest

from studies import starts

pytestmark = pytest.mark.unit

MIXTURE, DENSE = starts.A3B.name, starts.LLAMA.name


@pytest.mark.parametrize(
    "model, base_tp, samples, cap, tp",
    [(MIXTURE, 4, 128, 8192, 8), (MIXTURE, 4, 512, 8192, 4), (DENSE, 1, 128, 8192, 8), (DENSE, 1, 512, 8192, 4)],
)
def test_with_room_a_round_starts_where_the_oracle_starts_it(model, base_tp, samples, cap, tp):
    cell = starts.study((model, base_tp, False, samples, cap, 2, 0))
    assert cell.chosen[1:] == cell.oracle_start[1:] == [tp] and max(cell.oracle_lost) < starts.GOAL


def test_where_room_is_short_it_starts_where_least_has_to_wait():
    """Four KV heads are copied in tp8: half the room of tp4, which is hardly slower while few tokens are held."""
    cell = starts.study((MIXTURE, 1, False, 320, 8192, 2, 0))
    assert cell.chosen[1:] == [4] and not cell.oracle_lost, "once lengths are known"
    assert sum(cell.retracted[4]) < sum(cell.retracted[8])
    assert cell.lost < starts.GOAL < cell.started[8][1] / cell.started[4][1] - 1
