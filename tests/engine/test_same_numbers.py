"""Logprobs are those of stock SGLang, before and after a switch, to 1e-5 relative (float32)."""

from __future__ import annotations

import asyncio
import random

import pytest

from .conftest import long, tell
from .stock_answers import check_logprobs
from .streams import GREEDY, hold

RELATIVE = 1e-5


@pytest.fixture
def stock(servers, flat):
    return servers.stock(flat)


@pytest.fixture
def adaptive(servers, flat):
    return servers.adaptive(flat, 4, "--chunked-prefill-size", "128")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 503) for _ in range(length)]


worst = 0.0
"""Largest relative difference so far."""


def close(value: float, expected: float) -> bool:
    global worst
    difference = abs(value / expected - 1)
    worst = max(worst, difference)
    return difference <= RELATIVE


def body(seed: int, length: int, new: int, start: int = 0) -> dict:
    return {
        "input_ids": prompt(seed, length),
        "sampling_params": GREEDY | {"max_new_tokens": new},
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [7, 11, 502],
        "logprob_start_len": start,
    }


@pytest.mark.parametrize("degrees", [(2, 1, 4, 2, 4, 1), long((4, 1, 4, 1))], ids=str)
async def test_logprobs_through_switches(adaptive, session, stock, degrees):
    """Decoding, and some prompts in chunked prefill, at every switch."""
    bodies = [body(i, length, new=260) for i, length in enumerate((3, 40, 130, 300))]
    bodies.append(body(9, 200, new=250, start=150))
    late = [body(20 + i, 500, new=30) for i in range(len(degrees))]
    want = await stock.generate_async([*bodies, *late])
    adaptive.reconfigure(1)
    assert adaptive.post("/flush_cache?timeout=500").status_code == 200
    work = await hold(adaptive, session, bodies, step=10)
    for tp, each in zip(degrees, late, strict=True):
        # Its prefill takes four steps: the switch comes in the middle of it.
        await adaptive.set_schedule(session, {"tp": tp, "arrived": 1, "batch": 2}, {"step": 20, "hold": True})
        work.append(asyncio.ensure_future(adaptive.generate_one(session, each)))
        (record,) = (await adaptive.wait_for_schedule(session))["switches"]
        assert len(bodies) <= record["migrated"] < record["requests"], record
    await adaptive.set_schedule(session)
    for index, (got, expected) in enumerate(zip(await asyncio.gather(*work), want, strict=True)):
        assert got["output_ids"] == expected["output_ids"], f"request {index}"
        check_logprobs(got["meta_info"], expected["meta_info"], close)


def test_teacher_forced_nll_in_each_layout(adaptive, stock):
    """The negative log-likelihood of a long text, scored in each layout after a switch to it."""
    bodies = [body(100 + i, 1500, new=1) for i in range(2)]

    def score(server) -> list[dict]:
        assert server.post("/flush_cache?timeout=500").status_code == 200
        return [answer["meta_info"] for answer in server.generate(bodies)]

    want = score(stock)
    for tp in (1, 2, 4, 1):
        adaptive.reconfigure(tp)
        for got, expected in zip(score(adaptive), want, strict=True):
            assert len(got["input_token_logprobs"]) == 1500
            check_logprobs(got, expected, close)
            mine, theirs = (-sum(one[0] for one in meta["input_token_logprobs"][1:]) for meta in (got, expected))
            assert close(mine, theirs)


def test_worst():
    tell(f"largest relative difference of a logprob: {worst:.2g}")
