"""Work and control requests on their way through the coordinator (all interleavings: test_coordinator_machine.py)."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.coordinator.switching import BASE_ATTEMPTS

from .coordinator_rig import Rig
from .coordinator_world import Merged, Refused, Request

pytestmark = pytest.mark.unit


def test_needs_base_in_a_tail_layout_keeps_the_order():
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.settle()
    before = len(rig.world.to_leaders)
    update = rig.control("update", needs_base=True)
    assert rig.work(1) == [], "what came later waits"
    rig.settle()
    for rank in (0, 1):
        rig.world.answer(rank, "update")
    rig.settle()
    sent = [obj.kind for _, obj in rig.world.to_leaders[before:] if isinstance(obj, Request)]
    assert sent == ["update", "update", "work"]
    assert Merged(update, (0, 1)) in rig.world.server
    assert rig.world.records[-1].reason == "control"


def test_needs_base_waits_for_a_switch_that_is_being_prepared():
    """Ranks have looked at the weights already: these must not change under them."""
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.control("update", needs_base=True)
    rig.settle()
    kinds = [type(obj).__name__ for rank, obj in rig.world.to_leaders if rank == 0]
    assert kinds == ["Prepare", "Switch", "Prepare", "Switch", "Request"]


@pytest.mark.parametrize("fate", ["prepare", "abort"])
def test_controls_that_do_not_get_their_layout_are_answered_and_all_goes_on(fate):
    """The second attempt moves no KV, as there may be no memory for it.  The next control request tries anew."""
    rig = Rig(1, 2)
    rig.reconfigure(2)
    rig.work(2)
    rig.settle()
    first, second = rig.control("update", needs_base=True), rig.control("flush", needs_base=True)
    rig.control("abort")
    assert rig.work(1) == [], "what came later waits"
    rig.settle(fate)
    reason = "the engine cannot return to its base layout: rank 0: no"
    assert rig.world.server[-2:] == [Refused(first, reason), Refused(second, reason)]
    prepares = [obj for rank, obj in rig.world.to_leaders if isinstance(obj, m.Prepare) and obj.tp == 1]
    assert [prepare.recompute_below for prepare in prepares] == [0] + [m.NO_KV] * (BASE_ATTEMPTS - 1)
    assert rig.coordinator.layout.tp == 2 and len(rig.world.ranks[0].requests) == 3
    last = rig.control("update", needs_base=True)
    rig.settle()
    for rank in (0, 1):
        rig.world.answer(rank, "update")
    rig.settle()
    assert rig.world.server[-1] == Merged(last, (0, 1)) and rig.coordinator.layout.tp == 1
    assert rig.world.records[-1].error == "" and rig.world.recompute_below == 0
    assert sum(len(rank.requests) for rank in rig.world.ranks) == 3


def test_no_switch_without_memory():
    rig = Rig(1, 2)
    rig.control("release", releases=frozenset({"weights", "kv_cache"}))
    rig.control("resume", resumes=frozenset({"weights"}))
    rig.settle()
    rig.reconfigure(2)
    assert [(a.code, a.message) for a in rig.answers()] == [(409, "memory is released (kv_cache); resume it first")]
    rig.control("resume", resumes=frozenset({"weights", "kv_cache"}))
    rig.reconfigure(2)
    rig.settle()
    assert rig.answers()[-1].code == 200 and rig.coordinator.layout.tp == 2


ALL, KV = frozenset({"weights", "kv_cache"}), frozenset({"kv_cache"})


@pytest.mark.parametrize("first", [None, KV], ids=["nothing", "something released before"])
@pytest.mark.parametrize("second", [{"releases": ALL}, {"resumes": KV}], ids=["release", "resume"])
def test_a_release_or_resume_that_fails_changes_nothing(first, second):
    """Ranks do it all or none of them does: what was there before still is, what was away stays away."""
    rig = Rig(1, 2)
    if first:
        rig.control("release", releases=first)
    rig.control("update", failed=lambda reply: True, **second)
    rig.iterate()
    for rank in (0, 1):
        rig.world.answer(rank, "update")
    rig.settle()
    rig.reconfigure(2)
    rig.settle()
    says = (409, "memory is released (kv_cache); resume it first") if first else (200, "")
    assert [(answer.code, answer.message) for answer in rig.answers()] == [says]


def test_policies_wait_for_controls():
    rig = Rig(1, 2, policy="threshold", switch_at=2)
    rig.work(6)
    rig.settle()
    rig.control("flush")
    rig.finish(2)
    rig.settle()
    assert rig.world.preparing is None
    rig.world.answer(0, "flush"), rig.world.answer(1, "flush")
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2]


def test_policies_do_not_act_while_generation_is_paused():
    """Each bucket of a weight update would send the engine to the base layout and back."""
    rig = Rig(1, 2, policy="threshold", switch_at=4)
    rig.work(6)
    rig.control("pause", pauses=True)
    rig.settle()
    rig.finish(1)
    for _ in range(3):
        rig.control("update", needs_base=True)
        rig.settle()
        rig.world.answer(0, "update"), rig.world.answer(1, "update")
        rig.settle()
    assert rig.world.records == []
    rig.control("continue", pauses=False)
    rig.settle()
    assert [record.to_tp for record in rig.world.records] == [2]
