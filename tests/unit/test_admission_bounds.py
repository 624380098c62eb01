"""No prompt waits too long: whatever the weight versions do, and whatever the rules become."""

from __future__ import annotations

import random

import pytest

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import PromptKey
from sglang_pat.rollout.rules import Rules

from .admission_world import Clock, World, dumps, loads, strict
from .drawn import fewer

pytestmark = pytest.mark.unit


def job(jumps, staleness: int, rounds: int = 20, deferrals: int = 8) -> World:
    """``partial`` with one prompt in ten that is long; weights make so many versions between two rounds."""
    rules = Rules(mode="partial", num_prompts=8, num_responses=2, max_staleness=staleness, max_deferrals=deferrals)
    world = World(rules, lambda key, number: 400 if key.index % 10 == 3 else 5 + key.index % 7)
    clock, fed = Clock(world), 0
    for _ in range(rounds):
        wanted = world.admitter.wanted
        world.feed(0, range(fed, fed + wanted))
        fed += wanted
        world.version += jumps() - 1
        clock.round()
    return world


@pytest.mark.parametrize("jump", [1, 2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 9])
def test_a_long_prompt_is_returned_however_fast_versions_rise(jump, staleness):
    """World checks after each event that nobody was passed over too often, and that no token returned is too old."""
    world = job(lambda: jump, staleness)
    first_long = [number for number, summary in enumerate(world.rounds) if max(summary.kept_lengths) >= 400]
    assert first_long and first_long[0] <= 9
    # The first round does not know how many versions there will be to the next one.
    later = world.rounds[staleness + 2 :]
    assert sum(summary.thrown for summary in later) == 0, "with as many versions in each round nothing becomes too old"


@pytest.mark.parametrize("seed", range(fewer(20)))
def test_any_jumps(seed):
    rng = random.Random(seed)
    world = job(lambda: rng.choice([1, 1, 1, 2, 3, 7]), staleness=rng.randint(0, 6), deferrals=rng.randint(0, 4))
    assert PromptKey(0, 3) in world.returned


def test_rules_that_would_have_a_prompt_wait_too_long_are_refused():
    world = World(strict(num_prompts=4, eta_prompts=2.0, max_deferrals=3), lambda key, number: 5 + key.index % 4 * 100)
    world.feed(0, range(200))
    clock = Clock(world)
    clock.round()
    waiting = len(world.admitter.state.waiting)
    assert waiting == 4
    data = dumps(world.admitter)
    smaller = loads(data, strict(num_prompts=1, max_deferrals=3))
    before = dumps(smaller)
    with pytest.raises(ValueError, match="num_prompts is 1 and max_deferrals 3: 4 prompts wait.*give max_deferrals 4"):
        smaller.begin(9)
    assert dumps(smaller) == before
    for allowed in (strict(num_prompts=1, max_deferrals=4), strict(num_prompts=2, max_deferrals=3)):
        Admitter(allowed, loads(data).state).begin(9)


def test_a_lower_bound_returns_no_token_that_is_too_old():
    """World checks the age of what is returned; prompt 0 was passed over more often than is allowed now."""
    rules = Rules(mode="partial", num_prompts=2, num_responses=1, eta_prompts=2.0, max_staleness=4)
    world = World(rules, lambda key, number: 1 if key.index else 50)
    world.feed(0, range(40))
    clock = Clock(world)
    for _ in range(3):
        clock.round()
    assert world.admitter.state.waiting[0].deferrals == 3
    world.change(max_deferrals=2, max_staleness=1)
    clock.round()
    assert PromptKey(0, 0) in world.batch or PromptKey(0, 0) in world.returned
