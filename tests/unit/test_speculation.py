"""What speculation would gain (``studies.speculation``): never less than nothing, and never more than its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from studies import speculation
from studies.modelled import A3B, H100, LLAMA, make_times

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("model", [LLAMA, A3B])
@pytest.mark.parametrize("drafter", speculation.DRAFTERS)
def test_steps_are_between_plain_ones_and_what_all_accepted_tokens_give(model, drafter):
    batch, plain = np.array([1, 8, 64, 512]), make_times(H100, model)
    most = max(speculation.DRAFTERS[drafter].values())
    for tp in (1, 8):
        for context in (128, 16384):
            base = plain.step_seconds(tp, batch, batch * context)
            low, high = (
                speculation.Speculate(drafter, bound)(plain).step_seconds(tp, batch, batch * context)
                for bound in speculation.BOUNDS
            )
            assert (base / most < high).all() and (high <= low).all() and (low <= base).all()
    assert (high < base)[0], "one request of a long context, KV read once"
