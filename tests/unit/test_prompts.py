"""Prompts that have to be computed: how many a replica computes, and what survival makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_pat.policies import prompts
from sglang_pat.predict.profile import Profile

from .policy_world import crossing, snapshot
from .profiles_for_tests import prefill_points
from .test_survival import LEARNT, policy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("size", "prompt", "response", "replicas", "expected"),
    [
        (1, 8192, 250, 1, 16),
        (1, 8192, 250, 4, 4),
        (8, 8192, 250, 1, 4),  # two prompts, each by the two siblings of the first two steps
        (8, 32768, 250, 1, 2),
        (8, 1024, 250, 1, 16),  # all in two steps
        (8, 32768, 250, 2, 1),  # one prompt each
        (8, 32768, 4000, 2, 2),  # siblings are spread
        (8, 1024, 250, 4, 4),
    ],
)
def test_prompts_that_a_replica_computes(size, prompt, response, replicas, expected):
    family = np.repeat(np.arange(16 // size), size)
    assert prompts.count_prompts_to_compute(np.full(16, prompt), family, response, replicas) == (expected, prompt)


def test_uneven_prompts_are_computed_by_their_number():
    """Two of 8,192 tokens, each twice; sixteen of 1,024."""
    lengths = np.repeat([8192, 8192, 1024, 1024], 8)
    number, rms = prompts.count_prompts_to_compute(lengths, np.repeat(np.arange(4), 8), 250, 1)
    assert number == 20 and rms == pytest.approx(np.sqrt((4 * 8192**2 + 16 * 1024**2) / 20))


def long_prompts() -> Profile:
    """A prefill takes much longer in tp4, where all prompts have to come one after the other."""
    return crossing(prefill=prefill_points(lambda tp, n, b, c: 2e-5 * b * c / tp**0.3, (1, 8, 64), (128, 8192)))


@pytest.mark.parametrize(("families", "expected"), [(8, 1), (1, 2)], ids=["strangers", "siblings"])
def test_a_round_of_siblings_begins_where_their_prompt_is_computed_once(families, expected):
    situation = snapshot(requests=1, coming=8, quiet=0.0)
    coming = replace(situation.coming, prompt=np.full(8, 8192), family=-1 - np.arange(8) % families)
    assert policy(long_prompts())(replace(situation, coming=coming), LEARNT).tp == expected


def test_a_batch_that_is_not_computed_yet_is_not_merged():
    """The batch would be merged with the first token of each."""
    decide = policy(long_prompts())
    situation = snapshot([0] * 16, prompt=8192)
    computed = replace(situation.load, output=np.full(16, 1))
    assert decide(situation, LEARNT).tp == 1 < decide(replace(situation, load=computed), LEARNT).tp
    agents = replace(situation, peak=17)
    assert decide(agents, LEARNT).tp > 1, "one has ended: prompts of a next turn are in the tree"
