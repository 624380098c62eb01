"""Ten thousand requests, of which some are aborted, while the engine switches, pauses, lends ranks and updates its
weights without a rest: each is answered once, with the tokens of the weights that were there."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import aiohttp
import pytest

from sglang_pat.testing.server import Server

from .conftest import tell
from .streams import check_idle, open_session, post, prompt, switch
from .weight_updates import A, B

REQUESTS = int(os.environ.get("SGLANG_PAT_STORM", 10_000))
CLIENTS = 48


async def ask(session: aiohttp.ClientSession, server: Server, dice: random.Random, number: int) -> str:
    """Stream a request, perhaps abort it at one of its chunks, and check its answer; how it ended."""
    length, rid = dice.randint(1, 80), f"storm-{number}"
    sampling = {"temperature": dice.choice((0, 1.0)), "ignore_eos": True, "max_new_tokens": length}
    body = {"rid": rid, "input_ids": prompt(number, dice.randint(1, 60)), "sampling_params": sampling}
    aborted_at = dice.randint(1, length) if dice.random() < 0.05 else 0
    chunks = 0
    async for answer in server.stream(session, body):  # noqa: B007
        chunks += 1
        if chunks == aborted_at:
            assert await post(session, server, "/abort_request", {"rid": rid}) == 200
    ending, said = answer["meta_info"]["finish_reason"]["type"], answer["output_ids"]
    assert answer["meta_info"]["id"] == rid and set(said) <= {A, B}, answer
    assert len(said) == length if ending == "length" else ending == "abort" and aborted_at, answer
    return ending


async def disturb(session: aiohttp.ClientSession, server: Server, dice: random.Random, marker) -> str:
    """One of what an RL loop, or its user, does in the middle of a round."""
    kind = dice.choice(("switch", "switch", "switch", "pause", "retract", "update", "lend"))
    if kind == "switch":
        await switch(server, session, dice.choice((1, 2)))
    elif kind == "lend":
        assert await post(session, server, "/pat/lend_ranks", {"stride": 2}) == 200
        assert await post(session, server, "/pat/take_back_ranks") == 200
    else:
        mode = "in_place" if kind == "pause" else "retract"
        assert await post(session, server, "/pause_generation", {"mode": mode}) == 200
        if kind == "update":
            weights = {"model_path": str(marker(dice.choice((A, B))))}
            assert await post(session, server, "/update_weights_from_disk", weights) == 200
        assert await post(session, server, "/continue_generation", {}) == 200
    return kind


async def run(server: Server, marker) -> tuple[Counter, Counter]:
    """How requests ended, and what disturbed them, each with its number."""
    dice, numbers, endings, done = random.Random(45), iter(range(REQUESTS)), Counter(), Counter()

    async def keep_asking(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            endings[await ask(session, server, dice, number)] += 1

    async def keep_disturbing(session: aiohttp.ClientSession, clients: asyncio.Future) -> None:
        while not clients.done():
            done[await disturb(session, server, dice, marker)] += 1

    async with open_session() as session:
        clients = asyncio.gather(*(keep_asking(session) for _ in range(CLIENTS)))
        await asyncio.gather(clients, keep_disturbing(session, clients))
    return endings, done


@pytest.mark.soak
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_nothing_is_lost_in_a_storm(servers, marker, kind):
    """Nearly all drafts are right, if there are some, until the weights change."""
    flags = ("--pat-speculate", "4") if kind == "drafts" else ()
    server = servers.adaptive(marker(A), 2, *flags)
    endings, done = asyncio.run(run(server, marker))
    check_idle(server)
    assert endings.total() == REQUESTS and len(done) == 5, (endings, done)
    right = server.status()["totals"]["right_drafts"]
    assert right > 10 * REQUESTS if kind == "drafts" else right == 0
    tell(f"storm, {kind}: {right} drafts right, {dict(endings)} among {dict(done)}")
