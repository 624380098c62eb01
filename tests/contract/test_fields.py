"""Every field of a request is in the mixtures that the engine is asked together (``tests/engine/mixtures.py``)."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from ..engine import mixtures

pytestmark = pytest.mark.contract


def test_every_field_is_drawn_or_somebody_says_why_not():
    left = [name for names in mixtures.LEFT.values() for name in names.split()]
    there = [field.name for field in fields(GenerateReqInput)]
    there += inspect.signature(SamplingParams).parameters
    assert sorted({*mixtures.FIELDS, *mixtures.PARAMS, *left}) == sorted({*there})
