"""Where ``survival`` starts a round on modelled machines (``studies.starts``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies import starts

pytestmark = [pytest.mark.unit, pytest.mark.long]

MIXTURE, DENSE = starts.A3B.name, starts.LLAMA.name


@pytest.mark.parametrize("model, base_tp", [(MIXTURE, 4), (DENSE, 1)])
@pytest.mark.parametrize("samples, cap, tp", [(64, 4096, 8), pytest.param(512, 8192, 4, marks=pytest.mark.long)])
def test_with_room_a_round_starts_where_the_oracle_starts_it(model, base_tp, samples, cap, tp):
    cell = starts.study((model, base_tp, False, samples, cap, 2, 0))
    assert cell.chosen[1:] == cell.oracle_start[1:] == [tp] and max(cell.oracle_lost) < starts.GOAL


def test_where_room_is_short_it_starts_where_least_has_to_wait(monkeypatch):
    """Four KV heads are copied in tp8: half the room of tp4, which is hardly slower while few tokens are held."""
    node = starts.make_node(MIXTURE, 1, False)
    small = replace(node, room={tp: tokens // 4 for tp, tokens in node.room.items()})
    monkeypatch.setattr(starts, "make_node", lambda *_: small)
    cell = starts.study((MIXTURE, 1, False, 96, 8192, 2, 0))
    assert cell.chosen[1:] == [4] and not cell.oracle_lost, "once lengths are known"
    assert sum(cell.retracted[4]) < sum(cell.retracted[8])
    assert cell.lost < starts.GOAL < cell.started[8][1] / cell.started[4][1] - 1
