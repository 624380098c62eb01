"""The gate that holds a replica after so many steps or batches."""

from __future__ import annotations

from sglang_pat.messages import Go
from sglang_pat.rank.step_gate import StepGate


def test_a_gate_closes_at_its_point_and_is_open_without_one():
    gate = StepGate()
    for _ in range(5):
        gate.launched(decode=True)
    assert not gate.closed and gate.free
    gate.go(Go(number=3, steps=2))
    gate.launched(decode=False)
    gate.launched(decode=True)
    assert not gate.closed
    gate.launched(decode=True)
    assert gate.closed and not gate.said
    held = gate.held(rank=1)
    assert (held.rank, held.number, held.steps, held.batches) == (1, 3, 2, 3) and gate.said
    gate.go(Go(number=4, batches=1))
    assert not gate.closed and not gate.said
    gate.launched(decode=False)
    assert gate.closed
    gate.go(Go(number=6, steps=0))
    assert gate.closed and not gate.said


def test_a_gate_stays_closed_over_a_switch_unless_it_is_free():
    gate = StepGate()
    assert gate.leave(rank=0) is None and not gate.closed
    gate.go(Go(number=1, steps=5))
    gate.launched(decode=True)
    left = gate.leave(rank=0)
    assert (left.number, left.steps) == (1, 1), "what has not been reported"
    assert gate.closed and not gate.said
    gate.go(Go(number=2, steps=1))
    gate.launched(decode=True)
    gate.held(rank=0)
    assert gate.leave(rank=0) is None and gate.closed and not gate.said
