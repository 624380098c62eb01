"""A trainer that goes back to its checkpoint finds the prompts as they were then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.rollout import job_files, saved
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.history import KEPT, History
from sglang_pat.rollout.job_files import JobFiles
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import State

from .admission_world import Clock, World
from .drawn import examples

pytestmark = pytest.mark.unit

MODES = ("strict", "reorder", "partial")


def world_of(mode: str, **given) -> World:
    return World(Rules(**{"mode": mode, "num_prompts": 4, "num_responses": 2, "max_staleness": 3} | given))


def one_round(world: World, fed: int, version: int) -> int:
    wanted = world.admitter.wanted
    world.feed(0, range(fed, fed + wanted))
    world.version = version - 1
    Clock(world).round()
    return fed + wanted


def continued(mode: str, state: State, fed: int, version: int, rounds: int) -> list[tuple]:
    """What happens from a state on: kind, keys returned in order, tokens thrown away."""
    world, found = world_of(mode), []
    world.admitter.restore(state)
    world.check = lambda: None  # what was made before is not this world's
    for number in range(rounds):
        before = len(world.returned)
        fed = one_round(world, fed, version + number)
        summary = world.rounds[-1]
        found.append((summary.number, summary.kind, world.returned[before:], summary.thrown))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_from_each_kept_state_the_same_future(mode):
    """A trainer that goes back two steps, or any number that is kept, sees what it has seen."""
    world, history, fed = world_of(mode), History(), 0
    history.add(world.admitter.state)
    feds, futures = {-1: 0}, []
    for number in range(12):
        before = len(world.returned)
        fed = one_round(world, fed, number + 1)
        history.add(world.admitter.state)
        feds[number] = fed
        summary = world.rounds[-1]
        futures.append((summary.number, summary.kind, world.returned[before:], summary.thrown))
    assert history.numbers == list(range(11 - KEPT, 12))
    for number in history.numbers:
        state = history.at(number)
        again = continued(mode, state, feds[number], number + 2, 11 - number)
        assert again == futures[number + 1 :]
    history.back_to(9)
    assert history.numbers[-1] == 9 and history.at(10) is None


@examples(60)
@given(mode=st.sampled_from(MODES), seed=st.integers(0, 1000), filtering=st.booleans(), leave=st.integers(0, 40))
def test_what_happens_to_the_admitter_does_not_change_a_copy(mode, seed, filtering, leave):
    """Groups are shared with copies of the state: none may change, in whole rounds or in one that is left."""
    world, fed = world_of(mode, filter_groups=filtering), 0
    clock = Clock(world, useful=lambda key: hash((key, seed)) % 3 > 0)
    copies: list[tuple[State, bytes]] = []
    for _ in range(5):
        wanted = world.admitter.wanted
        world.feed(0, range(fed, fed + wanted))
        fed += wanted
        state = world.admitter.snapshot()
        copies.append((state, saved.dumps(Admitter(world.admitter.rules, state))))
        clock.round()
    world.feed(0, range(fed, fed + 9))
    world.begin()
    for _ in range(leave):
        if world.running:
            world.finish(next(iter(world.running)))
    world.cancel()
    for state, before in copies:
        assert saved.dumps(Admitter(world.admitter.rules, state)) == before


@pytest.mark.parametrize("links", [True, False])
def test_files_of_a_job(tmp_path, monkeypatch, links):
    """Also on a file system without hard links."""
    if not links:

        def link(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(job_files.os, "link", link)
    files = JobFiles(tmp_path)
    for number in range(12):
        files.write("a", b"under way %d" % number)
        files.write("a", b"after %d" % number, ended=number)
    files.write("a", b"under way")
    assert files.past("a") == list(range(11 - KEPT, 12))
    assert files.read("a") == b"under way"
    assert files.read("a", 10) == b"after 10"
    files.write("a", b"after 9 again", ended=9)
    assert files.past("a") == list(range(11 - KEPT, 10)), "what came later has not happened"
    assert files.read("a", 9) == b"after 9 again"
    assert "a" in files and "b" not in files and len(files) == 1
    files.remove("a")
    assert not list(tmp_path.iterdir())
