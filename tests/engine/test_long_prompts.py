"""Long prompts are computed in pieces, and a switch between two of them throws none away."""

from __future__ import annotations

import asyncio
import random

from . import schedule_runs, schedules
from .stock_answers import check_logprobs


def test_prompts_in_pieces_go_on(servers, flat):
    """Long prompts, each on a replica of its own, with a switch after each piece of 128 tokens: what is computed goes
    over, with the logprobs of the prompt."""
    server, rng = servers.adaptive(flat, 4, "--chunked-prefill-size", "128"), random.Random(7)
    prompts = [tuple(rng.randrange(5, 500) for _ in range(count)) for count in (30, 900, 1000, 1100)]
    work = [schedules.Request(prompt=prompt, max_new_tokens=20).body() for prompt in prompts]
    work[2] |= {"return_logprob": True, "logprob_start_len": 100, "top_logprobs_num": 2, "token_ids_logprob": [10, 90]}
    degrees = [2, 1, 4, 1, 2, 4, 2, 1]

    async def run():
        async with server.session() as session:
            entries = [{"arrived": len(work), "batch": 1 + i, "tp": tp} for i, tp in enumerate(degrees)]
            await server.arm(session, *entries)
            tasks = [asyncio.ensure_future(server.one(session, request)) for request in work]
            return (await server.reached(session))["switches"], [await task for task in tasks]

    assert server.post("/flush_cache?timeout=500").status_code == 200
    records, answers = asyncio.run(run())
    assert all(record["parked"] == 3 and not record["recomputed"] for record in records[:5]), records
    schedule_runs.check_idle(server)
    stock = servers.stock(flat, max_total_tokens=65536)  # which dies of some of them together
    for answer, wanted in zip(answers, (stock.generate([request])[0] for request in work), strict=True):
        assert answer["output_ids"] == wanted["output_ids"]
        assert answer["meta_info"]["cached_tokens"] == 0, "what it finds is its own"
        check_logprobs(answer["meta_info"], wanted["meta_info"])
