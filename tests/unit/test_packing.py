"""Lists of logprobs as arrays: what comes out is what went in."""

from __future__ import annotations

import math
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.switch.packing import Packed, pack, unpack

from .drawn import examples

pytestmark = pytest.mark.unit

floats = st.floats(allow_nan=True, allow_infinity=True)
ints = st.integers(-(2**63), 2**63 - 1)
numbers = st.one_of(floats, ints, st.booleans(), st.integers(2**63, 2**70))
rows = st.one_of(st.lists(floats, max_size=5), st.lists(ints, max_size=5), st.none())
values = st.one_of(
    st.none(),
    st.lists(st.one_of(floats, st.none())),
    st.lists(st.one_of(ints, st.none())),
    st.lists(rows),
    st.lists(st.one_of(numbers, st.none(), st.lists(numbers, max_size=3), st.text(max_size=2))),
)


def exact(value) -> object:
    """Type and bits of everything in it."""
    if isinstance(value, list):
        return [exact(one) for one in value]
    return type(value).__name__, struct.pack("d", value) if isinstance(value, float) else value


@examples(500)
@given(values)
def test_equal_to_the_bit_and_of_the_same_types(value):
    assert exact(unpack(pickle.loads(pickle.dumps(pack(value))))) == exact(value)


@pytest.mark.parametrize(
    "value",
    [
        [-0.5, -1.25],
        [None, -0.5, math.nan],
        [3, None, 70000],
        [None, [-0.1, -0.2], [-0.3]],
        [[], [1, 2, 3], None],
    ],
)
def test_logprobs_travel_as_arrays(value):
    packed = pack(value)
    assert isinstance(packed, Packed)
    assert exact(unpack(packed)) == exact(value)


@pytest.mark.parametrize("value", [None, [], [None], [1, 2.0], [True], [np.float32(1)], [(1.0,)], [[1], 2], [[[1]]], 5])
def test_anything_else_goes_as_it_is(value):
    assert pack(value) is value


def test_pickling_does_not_take_a_step_for_each_token():
    """Eight thousand tokens with two top logprobs each: as bytes, two dozen opcodes."""
    import pickletools

    value = [[-0.5 * i, -0.7 * i] for i in range(8000)]
    assert sum(1 for _ in pickletools.genops(pickle.dumps(pack(value), pickle.HIGHEST_PROTOCOL))) < 60
    assert sum(1 for _ in pickletools.genops(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))) > 24000
