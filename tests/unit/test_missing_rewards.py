"""Which samples of a group are trained on when rewards are missing."""

from __future__ import annotations

import pytest

from sglang_pat.rollout.missing import choose_rewarded


@pytest.mark.parametrize(
    ("has_reward", "chosen"),
    [
        ([True, True, True], [0, 1, 2]),
        ([True, False, True], [0, 2]),
        ([False, True, False], []),  # alone
        ([False, False], []),
        ([True], [0]),  # a group of one is compared with nothing in any case
        ([False], []),
        ([], []),
    ],
)
def test_only_what_has_a_reward_and_something_to_be_compared_with(has_reward, chosen):
    assert choose_rewarded(has_reward) == chosen
