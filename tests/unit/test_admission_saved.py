"""The admitter's rules, and its state in a file."""

from __future__ import annotations

import msgspec
import pytest

from sglang_pat import files
from sglang_pat.rollout import saved
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.rules import Rules

from .admission_world import Clock, World, strict

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "loose"), ("num_prompts", 0), ("num_responses", 0), ("eta_prompts", 0.9), ("eta_responses", 0.5),
        ("eta_prompts", float("nan")), ("max_deferrals", -1), ("max_staleness", -1),
    ],
)  # fmt: skip
def test_bad_rules_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is "):
        strict(**{field: value})


def test_every_response_counts_in_partial():
    with pytest.raises(ValueError, match="eta_responses is 1.5, must be 1 in partial"):
        strict(mode="partial")


def test_products_are_rounded_up_once():
    rules = Rules(num_prompts=10, num_responses=8, eta_prompts=1.1, eta_responses=1.25)
    assert (rules.started_prompts, rules.started_responses) == (11, 10)


def test_a_state_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    world = World(strict())
    world.feed(0, range(8))
    world.begin()
    file = tmp_path / "state.json"
    files.write(saved.dumps(world.admitter), file)
    before = file.read_bytes()
    assert saved.dumps(saved.loads(file.read_bytes())) == before
    world.finish(next(iter(world.running)))
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write(saved.dumps(world.admitter), file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
def test_a_round_of_a_process_that_is_gone_has_not_happened(mode):
    rules = Rules(mode=mode, num_prompts=2, num_responses=2, eta_prompts=2.0, max_staleness=3)
    world = World(rules)
    world.feed(0, range(12))
    clock = Clock(world)
    clock.round()
    before = [group.key for group in world.admitter.state.waiting]
    kept = sum(group.tokens for group in world.admitter.state.waiting)
    world.begin()
    world.finish(next(iter(world.running)))
    state = saved.restored(saved.decode(saved.dumps(world.admitter))).state
    assert state.round is None
    waiting = {group.key for group in state.waiting}
    assert set(before) <= waiting
    assert len(state.fresh) + len(state.waiting) + 2 == 12
    assert sum(group.tokens for group in state.waiting) >= kept
    assert all(sample.state in ("new", "done") for group in state.waiting for sample in group.samples)


@pytest.mark.parametrize("mode", ["strict", "partial"])
def test_pieces_are_those_of_the_groups_and_together_the_whole(mode):
    world = World(Rules(mode=mode, num_prompts=2, num_responses=2, eta_prompts=2.0, max_staleness=3))
    world.feed(0, range(12))
    Clock(world).round()
    rules, state = world.admitter.rules, world.admitter.state
    made = list(saved.pieces(rules, state))
    assert b"".join(made) == msgspec.json.encode(saved.Saved(version=saved.VERSION, rules=rules, state=state))
    assert len(state.waiting) and len(made) == len(state.fresh) + len(state.waiting) + 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not the state of an admitter"), (b"{}", "not the state"), (b"\xff", "not the state"),
        (b'{"version": 99, "rules": {"num_prompts": 1, "num_responses": 1}, "state": {}}', "version 99"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(content, said):
    with pytest.raises(ValueError, match=said) as error:
        saved.decode(content, "dir/job.json")
    assert "dir/job.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_state_of_another_mode_is_refused():
    data = saved.dumps(Admitter(strict()))
    with pytest.raises(ValueError, match="^mode is 'partial'"):
        saved.loads(data, Rules(mode="partial", num_prompts=1, num_responses=1))


def test_group_size_cannot_change_under_half_done_groups():
    rules = Rules(mode="partial", num_prompts=1, num_responses=2, eta_prompts=2.0)
    world = World(rules)
    world.feed(0, range(4))
    Clock(world).round()
    data = saved.dumps(world.admitter)
    with pytest.raises(ValueError, match="^num_responses is 1"):
        saved.loads(data, Rules(mode="partial", num_prompts=1, num_responses=1))
    assert saved.loads(data, Rules(mode="partial", num_prompts=3, num_responses=2)).rules.num_prompts == 3
