"""Routing replay: of every token of a request that lived through switches the experts are known, and stock SGLang's."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_pat.testing import models
from sglang_pat.testing.server import Server

from . import schedule_runs, schedules
from .conftest import MODELS
from .streams import Body, body, through, tokens

FLAG = "--enable-return-routed-experts"


@pytest.fixture(scope="session")
def model() -> Path:
    return models.make_random("qwen3_moe", MODELS / "qwen3_moe")


@pytest.fixture(scope="session")
def static(servers, model):
    """What stock SGLang answers."""

    def ask(bodies: list[Body]) -> list[dict[str, Any]]:
        return servers.get(model, FLAG, max_total_tokens=65536).generate(bodies)

    return ask


@pytest.fixture
def server(servers, model) -> Server:
    """Two ranks."""
    return servers.adaptive(model, 2, FLAG)


def ask(seed: int, count: int = 100, **fields: Any) -> Body:
    return body(seed, count, **fields) | {"return_routed_experts": True}


def read_experts(answer: dict[str, Any]) -> np.ndarray:
    """``[rows, layers, experts per token]``, in the order of their numbers."""
    rows = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    return np.sort(rows.reshape(-1, 3, 2), axis=-1)


def check_same(answers, wanted) -> None:
    assert tokens(answers) == tokens(wanted)
    for answer, want in zip(answers, wanted, strict=True):
        got, known = read_experts(answer), read_experts(want)
        assert got.shape == known.shape
        assert (got == known).all(), np.flatnonzero((got != known).any(axis=(1, 2)))


def test_experts_of_switched_requests(server, static):
    bodies = [ask(i, 150) for i in range(6)]
    answers, records = through(server, bodies)
    assert all(record["migrated"] == 6 for record in records), records
    check_same(answers, static(bodies))
