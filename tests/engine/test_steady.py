"""In steady state a switch makes nothing that could have been made at start (PAT section 4.3: pooled groups)."""

from __future__ import annotations

import asyncio

import pytest
import requests

from sglang_pat.testing.server import Server

BODIES = [
    {"input_ids": [5 + i, 7, 9], "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}}
    for i in range(4)
]


def start(model, *flags: str) -> Server:
    base = ("--tp", "1", "--dp", "2", "--adaptive-tp", "--pat-policy", "manual")
    return Server(model, *base, *flags, env={"SGLANG_PAT_CHECK_STEADY": "1"})


def test_switches_make_no_group_pool_or_graph(llama):
    with start(llama) as server:

        async def there_and_back() -> list:
            async with server.session() as session:
                work = asyncio.ensure_future(server.generate_async(BODIES))
                await server.until_decoding(session, 4)
                codes = [(await server.reconfigure_async(session, tp))[0] for tp in (2, 1, 2, 1)]
                await work
                return codes

        assert asyncio.run(there_and_back()) == [200] * 4
        assert [record["error"] for record in server.status()["switches"]] == [""] * 4


def test_one_that_would_is_refused(llama):
    """PAT's all-gather makes its group in the first switch that needs it."""
    with start(llama, "--pat-kv-exchange", "allgather") as server:
        with pytest.raises(requests.HTTPError, match="a switch called torch.distributed.new_group"):
            server.reconfigure(tp=2)
        assert server.status()["layout"] == {"tp": 1, "dp": 2}
        assert len(server.generate(BODIES)) == 4
