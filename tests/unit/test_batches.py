"""Which batches have a decode graph in which layout."""

from __future__ import annotations

import pytest

from sglang_pat.config import AdaptiveConfig
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.registry import SLACK, get_largest_batch, make_policy, select_graph_sizes

from .policy_world import snapshot
from .profiles_for_tests import decode_points, profile

pytestmark = pytest.mark.unit

SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64]


def config(policy, **given):
    return AdaptiveConfig(base=ParallelLayout(1, 4), policy=policy, profile="p", **given)


def overhead_and_work(tp, replicas, batch, context):
    """A step reads the weights, which tp divides, and pays for each request, which it does not; tp costs 1 ms more."""
    return 8e-3 / tp + 0.26e-3 * batch + (0.0 if tp == 1 else 1e-3)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (33, SIZES[:9]), (999, SIZES)])
def test_the_largest_batch_fits_into_a_graph_and_no_larger_graph_is_made(largest, sizes):
    assert select_graph_sizes(SIZES, largest) == sizes


def test_who_does_not_say_gets_all_graphs():
    for policy in ("manual", "schedule", "off"):
        assert get_largest_batch(config(policy), 4) is None
    assert select_graph_sizes(reversed(SIZES), None) == SIZES and select_graph_sizes([], 3) == []


def test_threshold_stays_merged_up_to_the_load_at_which_it_splits():
    largest = get_largest_batch(config("threshold", switch_at=6), 4)
    decide = make_policy("threshold", switch_at=6)
    assert decide(snapshot(tp=4, requests=largest), None).tp == 4
    assert decide(snapshot(tp=4, requests=largest + 1), None).tp == 1


def test_a_profile_says_up_to_which_batch_a_layout_pays():
    """All requests, in ms.  tp2, batch b: 5 + 0.26 b <= 8 + 0.26 ceil(b / 2), up to 23.  tp4, against tp2:
    3 + 0.26 b <= 5 + 0.26 ceil(b / 2), up to 15."""
    taken = profile(decode=decode_points(overhead_and_work, range(1, 65), (128, 1024)))
    assert get_largest_batch(config("survival"), 2, taken) == SLACK * 23
    assert get_largest_batch(config("pat"), 4, taken) == SLACK * 15


def test_a_layout_that_never_pays_still_has_a_graph():
    slower = profile(decode=decode_points(lambda tp, n, b, c: 1e-3 * tp * (1 + b), (1, 2, 4), (128,)))
    assert get_largest_batch(config("survival"), 4, slower) == SLACK
