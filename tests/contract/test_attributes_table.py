"""``attributes.txt`` and what is made of it, on a scheduler of plain objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from sglang_pat.checks import agreement as check
from sglang_pat.checks import attributes
from sglang_pat.host import adapter, groups, loop
from sglang_pat.host import census as inside

pytestmark = pytest.mark.contract


def test_what_the_table_does_not_know_is_named():
    found = {path: attributes.find_line(path) for path in ("Scheduler.tp_size", "Scheduler.brand_new")}
    assert [path for path, line in found.items() if line is None] == ["Scheduler.brand_new"]


def test_no_attribute_is_in_the_table_twice():
    patterns = [line.pattern for line in attributes.read_table()]
    assert len(patterns) == len(set(patterns))


def put(root: SimpleNamespace, path: str, value: int | None) -> None:
    """Set the attribute at this dotted path, with the objects on the way to it."""
    *owners, name = path.split(".")
    for owner in owners:
        root = vars(root).setdefault(owner, SimpleNamespace())
    setattr(root, name, value)


def scheduler(steps: int, counter: int) -> SimpleNamespace:
    """A scheduler after so many steps, in the middle of a profile: what counts its steps."""
    made = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace()))
    for path in adapter.rank.COUNTERS:
        put(made, path, 0)
    made.forward_ct, made.recv_skipper._counter = steps, counter
    for path, value in zip(adapter.rank.STEP_MARKS, (None, steps + 7), strict=True):
        put(made, path, value)
    return made


def test_the_leaders_counters_become_everyones():
    """A profile that had seven steps to go still has."""
    leader, other = scheduler(100, 1), scheduler(30, 2)
    loop.write_counters(other, loop.read_counters(leader))
    assert loop.read_counters(other) == loop.read_counters(leader)
    assert [loop.find(other, path) for path in adapter.rank.STEP_MARKS] == [None, 107]


def request(rid: str, **other) -> SimpleNamespace:
    kept = dict(priority=0, output_ids=[1, 2], kv_committed_len=5, cache_protected_len=3)
    made = SimpleNamespace(rid=rid, time_stats=SimpleNamespace(wait_queue_entry_time=7.5), **kept | other)
    made.kv = made  # where newer versions keep the same
    return made


def member(steps: int = 100, counter: int = 1, running=("a",), waiting=("b", "c"), **other) -> SimpleNamespace:
    """A scheduler of a group of two."""
    made = scheduler(steps, counter)
    made.tp_cpu_group = None
    made.running_batch = SimpleNamespace(reqs=[request(rid, **other) for rid in running])
    made.waiting_queue = [request(rid) for rid in waiting]
    return made


@pytest.fixture(autouse=True)
def group_of_two(monkeypatch) -> None:
    monkeypatch.setattr(groups, "get_place", lambda scheduler: (0, 2))


def check_gathered(monkeypatch, *members: SimpleNamespace) -> None:
    """The check of the first of ``members``, which hears what all hold."""

    def gather(held: list, mine: dict, group: None) -> None:
        assert mine == check._read_agreed_values(members[0])
        held[:] = [check._read_agreed_values(one) for one in members]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    check.check(members[0])


def test_ranks_that_agree_go_on(monkeypatch):
    monkeypatch.setenv(check.CHECK_AGREEMENT_ENV, "1")
    check_gathered(monkeypatch, member(), member())


@pytest.mark.parametrize(
    "other, named",
    [
        (dict(steps=101), "Scheduler.forward_ct: int 100, int 101"),
        (dict(counter=2), "Scheduler.recv_skipper._counter: int 1, int 2"),
        (dict(waiting=("c", "b")), "waiting_queue: "),
        (dict(running=()), "running_batch: "),
        (dict(priority=3), "running_batch: "),
        (dict(output_ids=[1]), "running_batch: "),
        (dict(kv_committed_len=4), "running_batch: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_that_differ_are_told_by_name(monkeypatch, other, named):
    monkeypatch.setenv(check.CHECK_AGREEMENT_ENV, "1")
    with pytest.raises(RuntimeError, match=f"ranks of a TP group do not agree on {named}"):
        check_gathered(monkeypatch, member(), member(**other))
    with pytest.raises(RuntimeError, match=f"do not agree on {named.partition(':')[0]}: "):
        check_gathered(monkeypatch, member(**other), member())


def test_nothing_is_gathered_outside_test_builds_and_in_a_group_of_one(monkeypatch):
    monkeypatch.setattr(dist, "all_gather_object", lambda *_, **__: pytest.fail("gathered"))
    monkeypatch.delenv(check.CHECK_AGREEMENT_ENV, raising=False)
    check.check(member())
    monkeypatch.setenv(check.CHECK_AGREEMENT_ENV, "1")
    monkeypatch.setattr(groups, "get_place", lambda scheduler: (0, 1))
    check.check(member())


def test_what_is_taken_is_classified_as_equal():
    for path in adapter.rank.COUNTERS:
        assert attributes.find_line(f"Scheduler.{path}").kind == "group"


class Root(SimpleNamespace):
    __module__ = "sglang.srt"  # what is not SGLang's is not looked into


def test_a_census_shows_stale_references_and_stops_at_cycles():
    held = Root(_threshold=3)
    held.again = held
    root = Root(skipper=held, tp_worker=SimpleNamespace(model_runner=SimpleNamespace()))
    values, identities = inside.take_census(root)
    assert values["Scheduler.skipper._threshold"] == "int 3"
    assert values["Scheduler.skipper.again"] == "-> Scheduler.skipper"
    assert identities["Scheduler.skipper"] == id(held)
