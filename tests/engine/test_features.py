"""Every generation feature goes on across switches as if there had been none: same answers as stock SGLang.

The same features where KV is computed again, and as on CUDA: ``test_features_otherwise.py``.
"""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise

import pytest

from .features import CHOICES, FEATURES, REGEX, stream_features
from .stock_answers import check_answer
from .streams import Stream


@pytest.fixture(scope="module")
def streamed(servers, llama, stock) -> dict[str, Stream]:
    server = servers.adaptive(llama)
    return asyncio.run(stream_features(server, stock.bodies))


@pytest.mark.parametrize("name", FEATURES)
def test_answer_equals_stock(name, streamed, stock):
    check_answer(stock, streamed[name], name)


@pytest.mark.parametrize("name", FEATURES)
def test_stream_has_no_gap_and_no_repeat(name, streamed):
    chunks = streamed[name].chunks
    for last, chunk in pairwise(chunks):
        assert chunk["text"].startswith(last["text"])
        assert chunk["output_ids"][: len(last["output_ids"])] == last["output_ids"]
        assert chunk["meta_info"]["completion_tokens"] >= last["meta_info"]["completion_tokens"]
    assert len(chunks[-1]["output_ids"]) == chunks[-1]["meta_info"]["completion_tokens"]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_grammars_hold(streamed):
    assert re.fullmatch(REGEX, streamed["regex"].answer["text"])
    items = json.loads(streamed["json_schema"].answer["text"])
    assert len(items) == 45 and set(items) <= set(CHOICES)
