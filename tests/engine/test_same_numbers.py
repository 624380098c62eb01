"""Logprobs are those of stock SGLang, before and after a switch, to 1e-5 relative (float32)."""

from __future__ import annotations

import asyncio
import random

import pytest

from .conftest import tell
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


def assert_close(got: list, want: list, what: str) -> None:
    """``[logprob, token, text]`` of each position; the logprob of the first prompt token is None."""
    assert [entry[1] for entry in got] == [entry[1] for entry in want], what
    for position, (value, expected) in enumerate(zip(got, want, strict=True)):
        if expected[0] is None:
            assert value[0] is None
        else:
            assert close(value[0], expected[0]), f"{what}, position {position}: {value[0]}, not {expected[0]}"


def assert_same_top(got: list, want: list, what: str) -> None:
    """The best tokens of each position, in whatever order those are that tie."""
    assert len(got) == len(want), what
    for position, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert (mine is None) == (theirs is None)
        for value, expected in zip(mine or [], theirs or [], strict=True):
            assert close(value[0], expected[0]), f"{what}, position {position}: {mine}, not {theirs}"


def assert_same_numbers(got: dict, want: dict, what: str) -> None:
    assert got["output_ids"] == want["output_ids"], what
    mine, theirs = got["meta_info"], want["meta_info"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert_close(mine[name], theirs[name], f"{what}: {name}")
    for name in ("input_top_logprobs", "output_top_logprobs"):
        assert_same_top(mine[name], theirs[name], f"{what}: {name}")
    assert len(mine["output_token_ids_logprobs"]) == len(theirs["output_token_ids_logprobs"])
    for got_ids, want_ids in zip(mine["output_token_ids_logprobs"], theirs["output_token_ids_logprobs"], strict=True):
        assert_close(got_ids, want_ids, f"{what}: output_token_ids_logprobs")


def body(seed: int, length: int, new: int, start: int = 0) -> dict:
    return {
        "input_ids": prompt(seed, length),
        "sampling_params": GREEDY | {"max_new_tokens": new},
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [7, 11, 502],
        "logprob_start_len": start,
    }


@pytest.mark.parametrize("degrees", [(2, 1, 4, 2, 4, 1), (4, 1, 4, 1)], ids=str)
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
        await adaptive.arm(session, {"tp": tp, "arrived": 1, "batch": 2}, {"step": 20, "hold": True})
        work.append(asyncio.ensure_future(adaptive.one(session, each)))
        (record,) = (await adaptive.reached(session))["switches"]
        assert len(bodies) <= record["migrated"] < record["requests"], record
    await adaptive.arm(session)
    for index, (got, expected) in enumerate(zip(await asyncio.gather(*work), want, strict=True)):
        assert_same_numbers(got, expected, f"request {index}")


def test_teacher_forced_nll_in_each_layout(adaptive, stock):
    """The negative log-likelihood of a long text, scored in each layout after a switch to it."""
    bodies = [body(100 + i, 1500, new=1) for i in range(2)]

    def score(server) -> list[list]:
        assert server.post("/flush_cache?timeout=500").status_code == 200
        return [answer["meta_info"]["input_token_logprobs"] for answer in server.generate(bodies)]

    want = score(stock)
    for tp in (1, 2, 4, 1):
        adaptive.reconfigure(tp)
        for got, expected in zip(score(adaptive), want, strict=True):
            assert len(got) == 1500
            assert_close(got, expected, f"tp {tp}")
            mine, theirs = (-sum(entry[0] for entry in entries[1:]) for entries in (got, expected))
            assert abs(mine - theirs) <= RELATIVE * theirs


def test_worst():
    tell(f"largest relative difference of a logprob: {worst:.2g}")
