"""Texts of ended responses: which leader is told of which (``coordinator/siblings.py``)."""

from __future__ import annotations

import pytest

from sglang_pat import messages as m
from sglang_pat.coordinator import siblings as module
from sglang_pat.coordinator.siblings import Siblings

from .coordinator_rig import Rig

pytestmark = pytest.mark.unit


def text(name: str, family: int = 1, rank: int = 0, version: int = 0, tokens: int = 5) -> m.EndedText:
    output = bytes(4 * tokens)
    return m.EndedText(rank=rank, family=family, name=name, context=b"", output=output, weight_updates=version)


def report(rank: int, *families: int) -> m.LoadReport:
    return m.LoadReport(
        rank=rank, tp=1, received=0, running=len(families), waiting=0, tokens=0, kv_used=0, kv_total=0, retracted=0,
        weight_updates=0, requests=[m.Running(1, 1, 9, family) for family in families],
    )  # fmt: skip


class Told:
    """An outbox."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[str]]] = []

    def send_to_leader(self, rank: int, obj: m.SiblingTexts) -> None:
        self.sent.append((rank, [one.name for one in obj.texts]))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def siblings(told) -> Siblings:
    return Siblings(told)


def test_others_are_told_once(siblings, told):
    for one in (text("a"), text("b", rank=1), text("c", family=2)):
        siblings.record(one)
    for _ in range(2):
        for rank in (0, 1, 2):
            siblings.tell(report(rank, 1, 1))
    assert told.sent == [(0, ["b"]), (1, ["a"]), (2, ["a", "b"])]
    siblings.record(text("d", rank=2))
    siblings.tell(report(2, 1))
    siblings.tell(report(1, 1, 2))
    assert told.sent[3:] == [(1, ["d", "c"])]


def test_new_groups_know_nothing(siblings, told):
    siblings.record(text("a"))
    siblings.forget_known()
    siblings.tell(report(0, 1))
    assert told.sent == [(0, ["a"])]


def test_texts_of_older_weights_are_dropped(siblings, told):
    siblings.record(text("old"))
    siblings.record(text("new", rank=1, version=1))
    siblings.record(text("late", rank=1))
    siblings.tell(report(0, 1))
    assert told.sent == [(0, ["new"])]


def test_what_was_not_used_for_longest_is_dropped(siblings, told, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 70 + 2 * module.TEXT_BYTES)
    for family in (1, 2, 1, 3):
        siblings.record(text(f"{family}", family, tokens=8))
    siblings.tell(report(1, 1, 2, 3))
    assert told.sent == [(1, ["1", "3"])]


def test_a_name_that_is_used_again_takes_no_room_twice(siblings, told, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100 + 3 * module.TEXT_BYTES)
    for _ in range(9):
        siblings.record(text("a", tokens=8))
    siblings.record(text("b", family=2, tokens=8))
    siblings.tell(report(1, 1, 2))
    assert told.sent == [(1, ["a", "b"])]


def test_what_is_dropped_is_not_remembered(siblings, told, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100 + 3 * module.TEXT_BYTES)
    for number in range(100):
        siblings.record(text(f"{number}", family=number, tokens=8))
        siblings.tell(report(1, number))
    assert [len(names) for names in siblings._known.values()] == [3, 3]


def test_a_leader_is_told_when_it_reports():
    """Not before: it may have no request of the prompt."""
    rig = Rig(1, 2, policy="off")
    rig.work(2)
    rig.settle()
    sent = len(rig.world.to_leaders)
    rig.coordinator.handle_rank_message(text("a"), 0.0)  # all requests of the rig have this prompt
    assert len(rig.world.to_leaders) == sent
    for rank in (0, 1):
        rig.world.report(rank)
    rig.deliver()
    assert [(rank, type(obj)) for rank, obj in rig.world.to_leaders[sent:]] == [(1, m.SiblingTexts)]
